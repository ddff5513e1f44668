import io
import struct
import time
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from tests.vision.pictures import LIMITS, encode, photo, pixels_of, png_chunk, raw_png
from triptych.errors import InvalidImage
from triptych.vision.image_header import ImageLimits
from triptych.vision.images import encoded_bytes, load_image

WHITE = [255, 255, 255]
BEST: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}
"""Options for the least loss a format can do."""


def reason_of(data: bytes, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(InvalidImage) as caught:
        load_image(data, limits)
    return caught.value.reason


@pytest.mark.parametrize("file_format", ["PNG", "BMP", "TIFF", "WEBP", "GIF", "JPEG"])
def test_every_documented_format_decodes(file_format: str) -> None:
    options = BEST.get(file_format, {})
    expected = np.asarray(photo()).astype(int)
    tolerance = {"JPEG": 6, "GIF": 60}.get(file_format, 0)
    assert np.abs(pixels_of(encode(photo(), file_format, **options)).astype(int) - expected).max() <= tolerance


@pytest.mark.parametrize("size", [(48, 32), (640, 480)])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_cut_off_128_bytes_before_its_end_is_corrupt(size: tuple[int, int], progressive: bool) -> None:
    data = encode(photo(*size), "JPEG", progressive=progressive)
    assert reason_of(data[:-128]) == "IMAGE_CORRUPT"


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_truncated_file_of_any_format_is_corrupt(file_format: str, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    data = encode(Image.fromarray(noise), file_format)
    assert reason_of(data[: int(len(data) * share)]) == "IMAGE_CORRUPT"


@pytest.mark.parametrize("level", [0, 6])
def test_a_png_with_any_flipped_bit_in_its_pixel_data_is_corrupt(level: int) -> None:
    data = encode(photo(16, 16), compress_level=level)
    start = data.index(b"IDAT") + 4
    for offset in range(start, data.index(b"IEND") - 4, 7):
        damaged = bytearray(data)
        damaged[offset] ^= 0x10
        assert reason_of(bytes(damaged)) == "IMAGE_CORRUPT"


@pytest.mark.parametrize("data", [b"hello, world", b"\x00" * 100, b"%PDF-1.7", b"<svg/>", b"\x89PN"])
def test_what_is_no_known_format_is_unsupported(data: bytes) -> None:
    assert reason_of(data) == "IMAGE_UNSUPPORTED"


def test_an_empty_file_is_corrupt() -> None:
    assert reason_of(b"") == "IMAGE_CORRUPT"


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_gives_the_same_as_the_upright_pixels(orientation: int, file_format: str) -> None:
    # Index arithmetic of its own, from the EXIF standard's table: where row 0 and column 0 of the file are.
    upright = np.asarray(photo())
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: upright.transpose(1, 0, 2)[::-1],
        7: upright.transpose(1, 0, 2)[::-1, ::-1],
        8: upright.transpose(1, 0, 2)[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[274] = orientation
    options = BEST.get(file_format, {})
    got = pixels_of(encode(Image.fromarray(np.ascontiguousarray(stored)), file_format, exif=exif, **options))
    assert got.shape == upright.shape
    assert np.abs(got.astype(int) - upright.astype(int)).max() <= (6 if file_format == "JPEG" else 0)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_does_not_spoil_the_picture() -> None:
    data = encode(photo(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + b"\xee" * 40)
    assert pixels_of(data).shape == (32, 48, 3)


def test_a_palette_with_transparency_is_composited_on_white() -> None:
    palette = png_chunk(b"PLTE", bytes([255, 0, 0, 0, 255, 0, 0, 0, 255]))
    data = raw_png(3, 1, 8, 3, b"\0\0\1\2", palette, png_chunk(b"tRNS", bytes([0, 128])))
    assert pixels_of(data)[0].tolist() == [WHITE, [127, 255, 127], [0, 0, 255]]


@pytest.mark.parametrize(
    "mode, file_format", [("LA", "PNG"), ("LA", "TIFF"), ("RGBA", "PNG"), ("RGBA", "TIFF"), ("RGBA", "WEBP")]
)
def test_hidden_colours_never_show(mode: str, file_format: str) -> None:
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[..., :3] = 77
    rgba[0, 0] = [77, 77, 77, 255]
    data = encode(
        Image.fromarray(rgba).convert(mode), file_format, **({"lossless": True} if file_format == "WEBP" else {})
    )
    assert pixels_of(data).tolist() == [[[77, 77, 77], WHITE], [WHITE, WHITE]]


def test_a_transparent_colour_is_honoured_at_every_bit_depth() -> None:
    def transparent(*values: int) -> bytes:
        return png_chunk(b"tRNS", struct.pack(f">{len(values)}H", *values))

    assert pixels_of(raw_png(2, 1, 1, 0, b"\0\x40", transparent(0)))[0].tolist() == [WHITE, WHITE]
    assert pixels_of(raw_png(2, 1, 2, 0, b"\0\x70", transparent(1)))[0].tolist() == [WHITE, WHITE]
    assert pixels_of(raw_png(2, 1, 4, 0, b"\0\x5a", transparent(5)))[0].tolist() == [WHITE, [170] * 3]
    assert pixels_of(raw_png(2, 1, 8, 0, b"\0\x05\x09", transparent(5)))[0].tolist() == [WHITE, [9] * 3]
    wide = raw_png(2, 1, 16, 0, b"\0" + struct.pack(">HH", 1000, 25700), transparent(1000))
    assert pixels_of(wide)[0].tolist() == [WHITE, [100] * 3]
    colour = raw_png(2, 1, 8, 2, b"\0" + bytes([1, 2, 3, 9, 9, 9]), transparent(1, 2, 3))
    assert pixels_of(colour)[0].tolist() == [WHITE, [9] * 3]
    deep = raw_png(
        2, 1, 16, 2, b"\0" + struct.pack(">6H", 1000, 2000, 3000, 60000, 1, 2), transparent(1000, 2000, 3000)
    )
    assert pixels_of(deep)[0].tolist() == [WHITE, [234, 0, 0]]


def test_a_transparent_gif_is_composited_on_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    assert pixels_of(encode(image, "GIF", transparency=0))[0].tolist() == [WHITE, [0, 255, 0]]


RAMP = np.linspace(0, 65535, 256)


@pytest.mark.parametrize(
    "array, file_format",
    [
        (RAMP.astype(np.uint16), "PNG"),
        (RAMP.astype(np.uint16), "TIFF"),
        (RAMP.astype(">u2"), "TIFF"),
        (RAMP.astype(np.int32), "TIFF"),
        (np.linspace(0, 255, 256).astype(np.int32), "TIFF"),
        (np.linspace(-(2**31), 2**31 - 1, 256).astype(np.int32), "TIFF"),
        (RAMP.astype(np.float32), "TIFF"),
        (np.linspace(0, 1, 256).astype(np.float32), "TIFF"),
        (np.linspace(-3, 1e6, 256).astype(np.float32), "TIFF"),
    ],
)
def test_a_ramp_in_wide_grey_stays_a_ramp(
    array: "np.ndarray[tuple[int], np.dtype[np.generic]]", file_format: str
) -> None:
    image = Image.fromarray(np.tile(array, (2, 1)))
    grey = pixels_of(encode(image, file_format))
    assert (grey[..., 0] == grey[..., 1]).all() and (grey[..., 0] == grey[..., 2]).all()
    assert np.abs(grey[0, :, 0].astype(int) - np.arange(256)).max() <= 1
    assert (np.diff(grey[1, :, 0].astype(int)) >= 0).all()


def test_big_endian_16_bit_grey_is_scaled_too() -> None:
    image = Image.frombytes("I;16B", (3, 1), struct.pack(">HHH", 0, 25700, 65535))
    assert pixels_of(encode(image, "TIFF"))[0, :, 0].tolist() == [0, 100, 255]


def test_a_dark_16_bit_picture_is_not_brightened() -> None:
    image = Image.fromarray(np.full((2, 2), 257 * 8, np.uint16))
    assert (pixels_of(encode(image)) == 8).all()


def test_floats_that_are_not_finite_do_not_spoil_the_others() -> None:
    values = np.array([[0.0, 0.5, 1.0, np.nan, np.inf, -np.inf]], np.float32)
    assert pixels_of(encode(Image.fromarray(values), "TIFF"))[0, :, 0].tolist() == [0, 128, 255, 0, 255, 0]


def test_a_cmyk_jpeg_has_its_colours() -> None:
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert np.abs(pixels_of(encode(image, "JPEG", quality=100)).astype(int) - [255, 0, 0]).max() <= 3


def test_a_lab_tiff_has_its_colours() -> None:
    srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    to_lab = ImageCms.buildTransformFromOpenProfiles(srgb, lab, "RGB", "LAB")
    image = ImageCms.applyTransform(Image.new("RGB", (4, 4), (200, 30, 60)), to_lab)
    assert image is not None
    assert np.abs(pixels_of(encode(image, "TIFF")).astype(int) - [200, 30, 60]).max() <= 2


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_and_several_pages_are_refused(file_format: str) -> None:
    data = encode(photo(seed=1), file_format, save_all=True, append_images=[photo(seed=2)])
    assert reason_of(data) == "IMAGE_UNSUPPORTED"


def test_a_photo_with_previews_behind_it_is_its_first_picture() -> None:
    data = encode(photo(seed=1), "MPO", quality=100, subsampling=0, save_all=True, append_images=[photo(seed=2)])
    assert np.abs(pixels_of(data).astype(int) - np.asarray(photo(seed=1))).max() <= 6


def huge_png(width: int, height: int) -> bytes:
    return raw_png(width, height, 8, 2, b"")


def huge_gif(width: int, height: int) -> bytes:
    data = bytearray(encode(photo(8, 8), "GIF"))
    struct.pack_into("<HH", data, 6, width, height)
    return bytes(data)


def huge_webp(width: int, height: int) -> bytes:
    extended = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0"
    extended += (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBP" + extended + encode(photo(8, 8), "WEBP", lossless=True)[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize(
    "data",
    [huge_png(50_000, 50_000), huge_png(50_000, 50_000)[:40], huge_gif(60_000, 60_000), huge_webp(16_000, 16_000)],
)
def test_a_tiny_file_that_declares_a_huge_raster_is_refused_from_its_header(data: bytes) -> None:
    assert len(data) < 2000
    for read in (encoded_bytes, load_image):
        with pytest.raises(InvalidImage) as caught:
            read(data, LIMITS)
        assert caught.value.reason == "IMAGE_TOO_LARGE"
        assert "max_image_pixels=64000000" in caught.value.message


def test_12000_x_12000_pixels_are_refused_naming_both_numbers() -> None:
    with pytest.raises(InvalidImage) as caught:
        load_image(huge_png(12_000, 12_000), LIMITS)
    assert caught.value.reason == "IMAGE_TOO_LARGE"
    assert "144000000" in caught.value.message and "64000000" in caught.value.message


def test_the_byte_limit_names_both_numbers() -> None:
    with pytest.raises(InvalidImage) as caught:
        load_image(b"\xff\xd8\xff" + b"\0" * 100, ImageLimits(max_bytes=64, max_pixels=100))
    assert caught.value.reason == "IMAGE_TOO_LARGE"
    assert "103" in caught.value.message and "max_image_bytes=64" in caught.value.message


def test_a_png_within_limits_may_still_lie_about_its_pixels() -> None:
    assert reason_of(huge_png(100, 100)) == "IMAGE_CORRUPT"


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_random_damage_never_raises_anything_but_invalid_image() -> None:
    rng = np.random.default_rng(7)
    for file_format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        data = encode(photo(), file_format)
        for _ in range(60):
            damaged = bytearray(data)
            for offset in rng.integers(0, len(data), 5):
                damaged[offset] = rng.integers(256)
            try:
                load_image(bytes(damaged), LIMITS)
            except InvalidImage as error:
                assert error.reason.startswith("IMAGE_")


def test_normalised_pictures_can_be_saved_again_without_loss() -> None:
    image = load_image(encode(photo()), LIMITS)
    again = load_image(encode(image), LIMITS)
    assert image.tobytes() == again.tobytes()
    assert Image.open(io.BytesIO(encode(image))).size == (48, 32)


@pytest.mark.parametrize("size", [(1, 2_000_000), (2_000_000, 1)])
def test_a_strip_of_wide_grey_takes_no_longer_than_a_square(size: tuple[int, int]) -> None:
    data = encode(Image.new("F", size, 0.5), "TIFF", compression="tiff_lzw")
    started = time.monotonic()
    assert (pixels_of(data) == 128).all()
    assert time.monotonic() - started < 10
