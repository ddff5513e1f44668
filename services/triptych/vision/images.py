"""The one way from an encoded picture to upright RGB pixels."""

import io

from PIL import Image

from triptych.errors import InvalidImage
from triptych.vision.colours import to_rgb
from triptych.vision.data_url import decode_data_url
from triptych.vision.image_header import ImageLimits, corrupt, open_image, sniff_format

_ORIENTATION_TAG = 274
_PNG_BIT_DEPTH = 24  # Offset of the byte: signature, chunk header, width, height, bit depth.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def encoded_bytes(source: bytes | str, limits: ImageLimits) -> bytes:
    """Returns the encoded file that a request carries, as bytes or in a `data:` URL, after a look at its header.

    No raster is allocated. Raises InvalidImage with the reasons of `decode_data_url` and `open_image`.
    """
    data = decode_data_url(source, limits.max_bytes) if isinstance(source, str) else source
    open_image(data, limits)
    return data


def load_image(data: bytes, limits: ImageLimits) -> Image.Image:
    """Decodes a file and returns it upright, in mode RGB.

    EXIF orientation is applied, transparency composited on white, wide grey scaled (see `to_rgb`). Animations and
    multi-page files were refused: there is no telling which frame is meant. Peak memory is 8 to 16 bytes a pixel.

    Raises InvalidImage: IMAGE_CORRUPT when any part of the raster is missing or damaged; else as `open_image`.
    """
    image = open_image(data, limits)
    name = sniff_format(data) or "image"
    try:
        if name == "PNG":
            # Decoding skips the checksums of the pixel data; a flipped bit would be another picture.
            Image.open(io.BytesIO(data), formats=("PNG",)).verify()
        image.load()
        upright = _UPRIGHT.get(_orientation(image))
        rgb = to_rgb(image, bit_depth=data[_PNG_BIT_DEPTH] if name == "PNG" else 8)
        return rgb if upright is None else rgb.transpose(upright)
    except InvalidImage:
        raise
    except Exception as error:  # Plug-ins raise anything on hostile bytes: struct.error, zlib.error, SyntaxError...
        raise corrupt(name, error) from None


def _orientation(image: Image.Image) -> int:
    """Returns the EXIF orientation that decoding has not applied yet; damaged EXIF data counts as none."""
    try:
        # Only now: a PNG may carry EXIF behind its pixels, and decoding a TIFF turns it upright by itself.
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # The picture is fine, its description is not.
        return 1
