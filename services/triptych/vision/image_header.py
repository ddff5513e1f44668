"""What can be known about an encoded image before its raster is allocated."""

import io
import struct
import warnings
from dataclasses import dataclass

from PIL import Image

from triptych.errors import InvalidImage

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")

# Our own limit, checked right after the header is read, is the one that counts. Pillow's error at twice
# Image.MAX_IMAGE_PIXELS stays on: it guards allocations inside plug-ins, such as frames larger than a GIF's screen.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What an image may cost.

    Attributes:
        max_bytes: Largest encoded file, in bytes (knob max_image_bytes).
        max_pixels: Largest raster, in pixels (knob max_image_pixels). Pillow's own guard ends at 178 million.
    """

    max_bytes: int
    max_pixels: int


def sniff_format(data: bytes) -> str | None:
    """Returns Pillow's name of the format that the first bytes announce, or None when it is none of FORMATS."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"BM"):
        return "BMP"
    if data.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "TIFF"
    return None


def open_image(data: bytes, limits: ImageLimits) -> Image.Image:
    """Returns an image whose header has been read and found within limits; its raster is not decoded yet.

    Raises InvalidImage: IMAGE_TOO_LARGE, IMAGE_UNSUPPORTED (format, or more than one frame or page), IMAGE_CORRUPT.
    """
    if len(data) > limits.max_bytes:
        raise too_many_bytes(len(data), limits.max_bytes)
    if not data:
        raise InvalidImage("the image is empty", reason="IMAGE_CORRUPT")
    name = sniff_format(data)
    if name is None:
        raise InvalidImage(f"the image is none of {', '.join(FORMATS)}", reason="IMAGE_UNSUPPORTED")
    # The plug-ins of WebP and GIF allocate while they open; that of PNG reads on to the pixels before it tells the
    # size, and so calls a bomb that ends before them corrupt.
    early = {"WEBP": _webp_size, "GIF": _gif_size, "PNG": _png_size}.get(name)
    if early is not None:
        _check_raster(*early(data), limits)
    try:
        image = Image.open(io.BytesIO(data), formats=(name,))
        _check_raster(image.width, image.height, limits)
        # An MPO is a photo with previews behind it: its first picture is the picture.
        animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except InvalidImage:
        raise
    except Image.DecompressionBombError:
        raise InvalidImage(
            f"the image declares a raster beyond max_image_pixels={limits.max_pixels}", reason="IMAGE_TOO_LARGE"
        ) from None
    except Exception as error:  # Plug-ins raise anything on hostile bytes: struct.error, IndexError, SyntaxError...
        raise corrupt(name, error) from None
    if animated:
        raise InvalidImage(
            f"the {name} holds several frames or pages; send the one that is meant", reason="IMAGE_UNSUPPORTED"
        )
    return image


def corrupt(name: str, error: Exception) -> InvalidImage:
    """Returns the error for a file that does not decode; it names the kind of failure, never the content."""
    return InvalidImage(f"the {name} is truncated or damaged ({type(error).__name__})", reason="IMAGE_CORRUPT")


def too_many_bytes(size_bytes: int, max_bytes: int) -> InvalidImage:
    """Returns the error for a file above the limit."""
    return InvalidImage(
        f"the image has {size_bytes} bytes, more than max_image_bytes={max_bytes}", reason="IMAGE_TOO_LARGE"
    )


def _check_raster(width: int, height: int, limits: ImageLimits) -> None:
    if width * height > limits.max_pixels:
        raise InvalidImage(
            f"the image declares {width}x{height} = {width * height} pixels, "
            f"more than max_image_pixels={limits.max_pixels}",
            reason="IMAGE_TOO_LARGE",
        )


def _gif_size(data: bytes) -> tuple[int, int]:
    return (0, 0) if len(data) < 10 else struct.unpack_from("<HH", data, 6)


def _png_size(data: bytes) -> tuple[int, int]:
    return (0, 0) if len(data) < 24 else struct.unpack_from(">II", data, 16)


def _webp_size(data: bytes) -> tuple[int, int]:
    """Returns the canvas of a WebP file, or (0, 0) when its first chunk is damaged: the decoder will say so."""
    chunk = data[12:16]
    if chunk == b"VP8X" and len(data) >= 30:
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if chunk == b"VP8L" and len(data) >= 25:
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 " and len(data) >= 30:
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0
