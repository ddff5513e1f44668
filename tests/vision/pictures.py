"""Encoded pictures for tests, the damaged and the hand-made ones included."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from triptych.vision.image_header import ImageLimits
from triptych.vision.images import load_image

LIMITS = ImageLimits(max_bytes=20 << 20, max_pixels=64_000_000)


def pixels_of(data: bytes) -> npt.NDArray[np.uint8]:
    """Returns what the normaliser makes of a file: [height, width, 3]."""
    image = load_image(data, LIMITS)
    assert image.mode == "RGB"
    return np.asarray(image)


def encode(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """Returns a picture as a file."""
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def photo(width: int = 48, height: int = 32, seed: int = 0) -> Image.Image:
    """Returns a smooth picture without symmetry."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 255, (4, 6, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """Returns a PNG chunk with the right checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def raw_png(width: int, height: int, bits: int, colour_type: int, scanlines: bytes, *extra: bytes) -> bytes:
    """Returns a PNG from its parts; scanlines include their filter bytes, `extra` are chunks before the pixels."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0))
    body = png_chunk(b"IDAT", zlib.compress(scanlines))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + body + png_chunk(b"IEND", b"")


def data_url(data: bytes, mime: str = "image/png", marker: str = ";base64") -> str:
    """Returns a file as a `data:` URL."""
    return f"data:{mime}{marker},{base64.b64encode(data).decode()}"
