import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.router.fakes import SPEC
from tests.vision.pictures import photo
from triptych.v1 import inference_pb2
from triptych.vision.encoder_spec import EncoderSpec, parse_encoder_spec
from triptych.vision.preprocess import Pixels, preprocess
from triptych.vision.resolution import encoded_side

pytestmark = pytest.mark.slow


def reference(image: Image.Image, side: int) -> Pixels:
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_mean=list(SPEC.image_mean),
        image_std=list(SPEC.image_std),
    )
    result: Pixels = processor(image, return_tensors="np")["pixel_values"][0]
    return result


SIZES = [
    (112, 112),
    (161, 184),
    (184, 161),
    (113, 112),
    (30, 150),
    (150, 30),
    (640, 480),
    (1000, 999),
    (7, 5),
    (1, 1),
    (6, 384),
    (2000, 40),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [112, 84, 56, 14])
def test_pixels_equal_transformers_bit_for_bit(size: tuple[int, int], side: int) -> None:
    image = photo(*size, seed=size[0])
    ours = preprocess(image, SPEC, side)
    assert ours.shape == (3, side, side)
    assert ours.dtype == np.float32
    assert ours.flags.c_contiguous
    assert np.array_equal(ours, reference(image, side))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 2**32))
def test_pixels_equal_transformers_for_noise_of_any_size(width: int, height: int, seed: int) -> None:
    levels = 2 / 255 / min(SPEC.image_std) if max(width, height) > 64 * min(width, height) else 0
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    assert np.abs(preprocess(image, SPEC, 112) - reference(image, 112)).max() <= levels + 1e-5


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(400, 4000), st.booleans(), st.integers(0, 2**32))
def test_noisy_strips_of_any_length_are_within_two_levels_of_transformers(
    short: int, long: int, tall: bool, seed: int
) -> None:
    size = (long, short, 3) if tall else (short, long, 3)
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 255, size, dtype=np.uint8))
    levels = 2 / 255 / min(SPEC.image_std)
    assert np.abs(preprocess(image, SPEC, 112) - reference(image, 112)).max() <= levels + 1e-5


@pytest.mark.parametrize("size", [(3, 400), (1500, 20)])
def test_long_strips_are_within_one_level_of_transformers(size: tuple[int, int]) -> None:
    level = 1 / 255 / min(SPEC.image_std) + 1e-5
    image = photo(*size)
    assert np.abs(preprocess(image, SPEC, 112) - reference(image, 112)).max() <= level


@pytest.mark.parametrize("size", [(1, 2_000_000), (2_000_000, 1)])
def test_extreme_strips_cost_no_more_than_their_result(size: tuple[int, int]) -> None:
    assert preprocess(Image.new("RGB", size, (255, 0, 0)), SPEC, 112).shape == (3, 112, 112)


VIT_L_336 = parse_encoder_spec(
    '{"image_side": 336, "patch_size": 14, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],'
    ' "resample": "bicubic", "rescale_factor": 0.00392, "hidden_size": 4096, "select_strategy": "default",'
    ' "fingerprint": "x"}',
    "1",
)


@pytest.mark.parametrize(
    "detail, large, small",
    [
        (inference_pb2.IMAGE_DETAIL_UNSPECIFIED, (336, 576), (112, 64)),
        (inference_pb2.IMAGE_DETAIL_HIGH, (336, 576), (112, 64)),
        (inference_pb2.IMAGE_DETAIL_MEDIUM, (224, 256), (70, 25)),
        (inference_pb2.IMAGE_DETAIL_LOW, (168, 144), (56, 16)),
        (inference_pb2.IMAGE_DETAIL_THUMBNAIL, (112, 64), (42, 9)),
    ],
)
def test_details_are_shares_of_the_native_side_in_whole_patches(
    detail: int, large: tuple[int, int], small: tuple[int, int]
) -> None:
    for spec, expected in ((VIT_L_336, large), (SPEC, small)):
        side = encoded_side(detail, spec)
        assert (side, spec.token_count(side)) == expected


def test_an_encoder_of_one_patch_keeps_it() -> None:
    tiny = EncoderSpec(14, 14, (0, 0, 0), (1, 1, 1), 1.0, "bicubic", 8, "full", "x", "1")
    assert encoded_side(inference_pb2.IMAGE_DETAIL_THUMBNAIL, tiny) == 14
    assert tiny.token_count(14) == 2
