"""`data:` URLs (RFC 2397) to bytes."""

import base64
import binascii
import re
import urllib.parse

from triptych.errors import InvalidImage
from triptych.vision.image_header import sniff_format, too_many_bytes

_URL_SAFE = str.maketrans("-_", "+/")
_BASE64 = re.compile(r"[A-Za-z0-9+/]*")


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """Returns the file inside a `data:` URL.

    Tolerated, because only one reading is possible: white space anywhere in the payload, missing padding, the URL-safe
    alphabet, percent-encoding, and any media type as long as the content itself is an image. Without `;base64` the
    payload is percent-encoded bytes, as the RFC says, and must then be an image.

    Raises InvalidImage: DATA_URL_INVALID naming the defect, IMAGE_URL_UNSUPPORTED for another scheme, IMAGE_TOO_LARGE
    before anything is decoded.
    """
    url = url.strip()
    if url[:5].lower() != "data:":
        raise InvalidImage(
            "only data: URLs are supported; fetch the image and send its bytes", reason="IMAGE_URL_UNSUPPORTED"
        )
    header, comma, payload = url[5:].partition(",")
    if not comma:
        raise _invalid("it has no comma between header and data")
    media_type, *parameters = (field.strip().lower() for field in header.split(";"))
    # Percent-encoding triples a byte, base64 adds a third: whatever is shorter than this may still fit.
    if len(payload) * 3 // 4 > 4 * max_bytes:
        raise too_many_bytes(len(payload) * 3 // 4, max_bytes)
    if "base64" in parameters:
        data = _decode_base64(payload, max_bytes)
    else:
        data = urllib.parse.unquote_to_bytes(payload)
        if sniff_format(data) is None:
            raise _invalid("it has no ;base64 marker, and its data is no percent-encoded image")
    if sniff_format(data) is None and media_type and not media_type.startswith("image/"):
        raise _invalid("its MIME type is not image/*, and neither is its content")
    return data


def _decode_base64(payload: str, max_bytes: int) -> bytes:
    if "%" in payload:
        payload = urllib.parse.unquote(payload)
    payload = "".join(payload.split()).translate(_URL_SAFE).rstrip("=")
    if not payload:
        raise _invalid("it has no data")
    if len(payload) * 3 // 4 > max_bytes:
        raise too_many_bytes(len(payload) * 3 // 4, max_bytes)
    if not _BASE64.fullmatch(payload):
        raise _invalid("its base64 has characters outside the alphabet, or padding before the end")
    if len(payload) % 4 == 1:
        raise _invalid("its base64 is cut off: the length cannot be completed by padding")
    try:
        return base64.b64decode(payload + "=" * (-len(payload) % 4))
    except binascii.Error:  # pragma: no cover - the checks above leave nothing to refuse
        raise _invalid("its base64 is malformed") from None


def _invalid(why: str) -> InvalidImage:
    return InvalidImage(f"the data: URL cannot be decoded: {why}", reason="DATA_URL_INVALID")
