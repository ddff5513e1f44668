import dataclasses
import itertools

import numpy as np
import pytest
from PIL import Image

from tests.router.fakes import SPEC
from tests.vision.pictures import LIMITS, encode, photo
from triptych.vision.identity import content_digest, identity
from triptych.vision.images import load_image

PHOTO = content_digest(photo())


def test_images_of_30x150_and_150x30_with_the_same_bytes_differ() -> None:
    data = np.random.default_rng(0).integers(0, 255, 30 * 150 * 3, dtype=np.uint8).tobytes()
    tall, wide = Image.frombytes("RGB", (30, 150), data), Image.frombytes("RGB", (150, 30), data)
    assert content_digest(tall) != content_digest(wide)
    single = [Image.new("RGB", (width, height)) for width, height in itertools.product((1, 2, 4, 8), repeat=2)]
    assert len({content_digest(image) for image in single}) == 16


def test_one_picture_in_different_files_is_one_picture() -> None:
    files = [encode(photo(), "PNG", compress_level=level) for level in (0, 9)]
    files += [encode(photo(), "BMP"), encode(photo(), "WEBP", lossless=True)]
    assert {content_digest(load_image(data, LIMITS)) for data in files} == {PHOTO}


def test_one_pixel_makes_another_picture() -> None:
    image = photo(2000, 1500)
    before = content_digest(image)
    image.putpixel((1999, 1499), (1, 2, 3))
    assert content_digest(image) != before


@pytest.mark.parametrize(
    "change",
    [
        {"image_mean": (0.5, 0.5, 0.5)},
        {"image_std": (0.5, 0.5, 0.5)},
        {"rescale_factor": 1.0},
        {"resample": "bilinear"},
        {"patch_size": 7},
        {"fingerprint": "beef"},
        {"version": "2"},
        {"select_strategy": "full"},
    ],
)
def test_the_same_pixels_prepared_or_encoded_differently_differ(change: dict[str, object]) -> None:
    other = dataclasses.replace(SPEC, **change)  # type: ignore[arg-type]
    assert identity(PHOTO, SPEC, 112, "") != identity(PHOTO, other, 112, "")


def test_side_and_salt_are_part_of_the_identity() -> None:
    names = {identity(PHOTO, SPEC, side, salt) for side in (112, 56) for salt in ("", "a", "b")}
    assert len(names) == 6
    assert all(len(name) == 32 for name in names)


def test_fields_cannot_be_moved_into_their_neighbours() -> None:
    one = dataclasses.replace(SPEC, fingerprint="ab", version="c")
    two = dataclasses.replace(SPEC, fingerprint="a", version="bc")
    crafted = dataclasses.replace(SPEC, fingerprint="a7:version1:b", version="c")
    names = {identity(PHOTO, spec, 112, "") for spec in (one, two, crafted)}
    assert len(names) == 3
    assert identity(PHOTO, one, 112, "4:salt1:x") != identity(PHOTO, one, 112, "x")


def test_identities_are_the_same_in_every_process() -> None:
    content = content_digest(Image.new("RGB", (2, 2), (1, 2, 3)))
    assert content.hex() == "db77f8ed3f68cef5cfa5cab00a4a16c97a46db61c8877306025b5b9306315f82"
