"""The 256-bit name of an image's features: equal identities mean equal features, for one tenant.

SHA-256 over tagged, length-prefixed fields, so that no two lists of fields give the same input. Two steps, because
pixels are hashed once while a picture may be looked up at several resolutions: `content_digest` covers the decoded
upright pixels at full size (the same picture in two encodings is one picture; 30x150 and 150x30 are two), `identity`
adds whatever else the features depend on.

The full raster costs 6 to 9 ns a pixel, where decoding costs 15 (JPEG) to 90 (PNG). Hashing the resized pixels would
be cheaper, but would need the resolution, which load may yet lower, before the picture has a name.
"""

import hashlib

from PIL import Image

from triptych.vision.encoder_spec import EncoderSpec
from triptych.vision.reduction import REVISION
from triptych.vision.reduction_spec import Reduction

_STRIP_BYTES = 4 << 20


def content_digest(image: Image.Image) -> bytes:
    """Returns 32 bytes that name a decoded image: mode, width, height and all pixels."""
    width, height = image.size
    digest = hashlib.sha256()
    _add(digest, b"mode", image.mode.encode())
    _add(digest, b"width", str(width).encode())
    _add(digest, b"height", str(height).encode())
    # In strips: a copy of the whole raster would raise peak memory by a third. Their heights follow from the width,
    # so equal images are cut equally.
    rows = max(1, _STRIP_BYTES // (3 * width))
    for top in range(0, height, rows):
        _add(digest, b"pixels", image.crop((0, top, width, min(top + rows, height))).tobytes())
    return digest.digest()


def identity(
    content: bytes, spec: EncoderSpec, side: int, cache_salt: str, reduction: Reduction | None = None
) -> bytes:
    """Returns the 32-byte identity of an image encoded at side x side pixels, for one cache salt.

    `reduction` is what the features go through; None also where it changes nothing, so that both share one identity.
    """
    digest = hashlib.sha256()
    _add(digest, b"content", content)
    _add(digest, b"preprocessing", spec.preprocessing.encode())
    _add(digest, b"side", str(side).encode())
    _add(digest, b"model", spec.fingerprint.encode())
    _add(digest, b"version", spec.version.encode())
    _add(digest, b"features", f"{spec.select_strategy}:{spec.hidden_size}".encode())
    _add(digest, b"salt", cache_salt.encode())
    if reduction is not None:
        _add(digest, b"reduction", f"{reduction}:{REVISION}".encode())
    return digest.digest()


def draft_identity(target: bytes, draft: EncoderSpec) -> bytes:
    """Returns the 32-byte identity of a draft encoder's features of an image that has the identity `target`."""
    digest = hashlib.sha256()
    _add(digest, b"draft of", target)
    _add(digest, b"model", draft.fingerprint.encode())
    _add(digest, b"version", draft.version.encode())
    return digest.digest()


def _add(digest: "hashlib._Hash", tag: bytes, value: bytes) -> None:
    digest.update(b"%d:%s%d:" % (len(tag), tag, len(value)))
    digest.update(value)
