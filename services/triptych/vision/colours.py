"""Any Pillow mode to RGB, without losing what a person would see."""

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

BACKGROUND = (255, 255, 255)
"""What lies behind transparent pixels: white, as a browser shows a picture on a plain page."""

_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
_CHUNK = 1 << 20  # Values at a time; never rows, of which a narrow picture has millions.
_PHOTOMETRIC_TAG = 262
_WHITE_IS_ZERO = 0


def to_rgb(image: Image.Image, bit_depth: int = 8) -> Image.Image:
    """Returns a decoded image in mode RGB; transparent parts show BACKGROUND, whatever colour hides in them.

    Grey with more than 8 bits is scaled, never clipped: see `grey_to_uint8`. CMYK, YCbCr and LAB are converted by
    Pillow (LAB through littleCMS); embedded ICC profiles are ignored, as Hugging Face's processors do. `bit_depth` is
    a PNG's bits per sample in the file, which give its transparent colour a meaning.
    """
    transparency = _transparency_of(image, bit_depth)
    if image.mode in _WIDE_MODES:
        return _wide_grey_to_rgb(image, transparency)
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    if transparency is not None:
        image.info["transparency"] = transparency
    return _composite(image if image.mode == "RGBA" else image.convert("RGBA"))


def grey_to_uint8(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Returns grey values of any type as 8 bits.

    The white point is that of the smallest usual range that holds all values: 65535 for unsigned 16 bits; 255 or
    65535 for integers; 1, 255 or 65535 for floats. Values outside every range (negative, or larger) are stretched
    from their own minimum to their maximum. So a ramp stays a ramp. NaN is black, an infinity the nearest finite
    extreme.
    """
    if values.dtype.kind == "u":
        return _quantise(values, 0.0, 65535.0)
    low, high = _finite_range(values)
    if low >= 0.0:
        for white in (255.0, 65535.0) if values.dtype.kind == "i" else (1.0, 255.0, 65535.0):
            if high <= white:
                return _quantise(values, 0.0, white)
    return _quantise(values, low, high)


def _finite_range(values: npt.NDArray[Any]) -> tuple[float, float]:
    """Returns the smallest and the largest finite value, (0, 1) when there is none."""
    flat = values.reshape(-1)
    low, high = np.inf, -np.inf
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        known = part[np.isfinite(part)]
        if known.size:
            low, high = min(low, float(known.min())), max(high, float(known.max()))
    return (low, high) if low <= high else (0.0, 1.0)


def _quantise(values: npt.NDArray[Any], low: float, high: float) -> npt.NDArray[np.uint8]:
    """Returns values as 8 bits, low as 0 and high as 255; what lies outside as the nearest of the two, NaN as 0."""
    # float64, because float32 cannot tell neighbours among 32-bit integers; in chunks, because that is eight times
    # the result's size.
    flat, result = values.reshape(-1), np.empty(values.size, np.uint8)
    scale = 255.0 / (high - low) if high > low else 0.0
    for start in range(0, flat.size, _CHUNK):
        part = np.nan_to_num(flat[start : start + _CHUNK].astype(np.float64), nan=low, posinf=high, neginf=low)
        result[start : start + _CHUNK] = np.rint((part.clip(low, high) - low) * scale)
    return result.reshape(values.shape)


def _wide_grey_to_rgb(image: Image.Image, transparency: Any) -> Image.Image:
    values: npt.NDArray[Any] = np.asarray(image)
    grey: npt.NDArray[np.uint8] = grey_to_uint8(values)
    tags = getattr(image, "tag_v2", {})
    if tags.get(_PHOTOMETRIC_TAG) == _WHITE_IS_ZERO:  # Pillow inverts such TIFFs at 8 bits only.
        grey = np.uint8(255) - grey
    if isinstance(transparency, int):
        grey = np.where(values == transparency, np.uint8(255), grey)
    return Image.fromarray(grey).convert("RGB")


def _composite(rgba: Image.Image) -> Image.Image:
    alpha = rgba.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return rgba.convert("RGB")
    background = Image.new("RGB", rgba.size, BACKGROUND)
    background.paste(rgba, mask=alpha)
    return background


def _transparency_of(image: Image.Image, bit_depth: int) -> Any:
    """Returns the transparent colour or palette alphas in the units of the decoded pixels, or None.

    Pillow reports a PNG's tRNS chunk in the file's bit depth, but its pixels in 8 bits. Of 16-bit RGB it keeps the
    high bytes only, so colours that share them with the transparent one become transparent too.
    """
    transparency = image.info.get("transparency")
    if bit_depth == 16 and isinstance(transparency, tuple):
        return tuple(value >> 8 for value in transparency)
    if bit_depth in (2, 4) and image.mode == "L" and isinstance(transparency, int):
        return transparency * 255 // ((1 << bit_depth) - 1)
    return transparency
