"""CLIP's preprocessing in numpy and Pillow: shortest edge to the side, centre crop, rescale, normalise.

Bit for bit what transformers' PIL-backed CLIPImageProcessor gives, which the tests compare against; for strips longer
than MAX_EXACT_ASPECT times their width, within two of 255 levels: rounding a corner may tip a value by one in each of
the two passes.
"""

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from triptych.vision.encoder_spec import EncoderSpec

Pixels = npt.NDArray[np.float32]

MAX_EXACT_ASPECT = 64
"""Longest to shortest edge up to which the whole picture is resized before the crop, as the reference does."""


def preprocess(image: Image.Image, spec: EncoderSpec, side: int) -> Pixels:
    """Returns an RGB image as the encoder takes it: [3, side, side], float32, normalised.

    Time and memory are bounded for every shape: see `_resize_and_crop`.
    """
    cropped = np.asarray(_resize_and_crop(image, Image.Resampling[spec.resample.upper()], side))
    # 256 possible values a channel: tables in the reference's own order and precision of operations.
    rescaled = (np.arange(256, dtype=np.float64) * spec.rescale_factor).astype(np.float32)
    pixels = np.empty((3, side, side), np.float32)
    for channel in range(3):
        table = (rescaled - np.float32(spec.image_mean[channel])) / np.float32(spec.image_std[channel])
        np.take(table, cropped[:, :, channel], out=pixels[channel])
    return pixels


def _resize_and_crop(image: Image.Image, resample: Image.Resampling, side: int) -> Image.Image:
    """Returns the central square of the image whose shortest edge was resized to side.

    The reference resizes everything and throws away what the crop leaves out, which for a strip of 1 x 64,000,000
    pixels would be terabytes. Beyond MAX_EXACT_ASPECT only the part that is kept is resampled. Not always, because
    Pillow rounds the part's corners to float32, and that moves some pixels by a level.

    The part is cut out first, whole pixels wide: far from the start, float32 could not tell one pixel from the next.
    """
    width, height = image.size
    shortest, longest = min(width, height), max(width, height)
    # Rounding down twice, as in torchvision and transformers: the long edge's new length, and the crop's start.
    scaled = int(side * longest / shortest)
    start = (scaled - side) // 2
    tall = height > width
    if longest <= MAX_EXACT_ASPECT * shortest:
        resized = image.resize((side, scaled) if tall else (scaled, side), resample)
        left, top = (0, start) if tall else (start, 0)
        return resized.crop((left, top, left + side, top + side))
    low, high = start * longest / scaled, min((start + side) * longest / scaled, longest)
    reach = 3 * max(1.0, longest / scaled) + 1  # Of Lanczos, the widest filter.
    first, last = max(0, math.floor(low - reach)), min(longest, math.ceil(high + reach))
    part = image.crop((0, first, width, last) if tall else (first, 0, last, height))
    low, high = low - first, high - first
    return part.resize((side, side), resample, box=(0, low, width, high) if tall else (low, 0, high, height))
