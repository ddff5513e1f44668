"""The file format of the disk tier: a header that says all about a run of blocks, then their bytes.

    magic          8 bytes, "TRIPTKV" and a format version
    header length  4 bytes, little-endian
    header CRC-32  4 bytes
    header         JSON: layout with the model's fingerprint, digest of the contents, each block's identity and CRC-32
    blocks         layout.block_bytes each

A file is written under a temporary name and renamed, so a name that ends in `.kv` was once complete.
"""

import hashlib
import json
import os
import secrets
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from triptych.worker.kv.identity import BlockIdentity
from triptych.worker.kv.layout import BlockLayout
from triptych.worker.kv.tiers.tier import BlockBytes

MAGIC = b"TRIPTKV\x01"
SUFFIX = ".kv"
TEMPORARY = ".tmp"

_PREFIX = struct.Struct("<8sII")
_MOST_HEADER_BYTES = 16 << 20


class DamagedRun(Exception):
    """A file is not what its name or header promise."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of blocks on disk.

    Attributes:
        path: The file.
        identities: Its blocks, in the order of the file.
        checksums: Their CRC-32s.
        data_offset: Where the first block's bytes begin.
        size_bytes: Size of the file.
    """

    path: Path
    identities: tuple[BlockIdentity, ...]
    checksums: tuple[int, ...]
    data_offset: int
    size_bytes: int


def write_run(folder: Path, layout: BlockLayout, blocks: Sequence[tuple[BlockIdentity, BlockBytes]]) -> Run:
    """Writes a run of blocks as a new file of `folder`. Raises OSError, and leaves nothing behind then."""
    identities = tuple(identity for identity, _ in blocks)
    checksums = tuple(zlib.crc32(data.data) for _, data in blocks)
    header = json.dumps(
        {
            "layout": asdict(layout),
            "contents": _digest(identities),
            "blocks": [
                [identity.key.hex(), identity.parent.hex(), identity.content.hex(), checksum]
                for identity, checksum in zip(identities, checksums, strict=True)
            ],
        }
    ).encode()
    name = secrets.token_hex(16)
    path, temporary = folder / f"{name}{SUFFIX}", folder / f"{name}{TEMPORARY}"
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(_PREFIX.pack(MAGIC, len(header), zlib.crc32(header)))
            file.write(header)
            for _, data in blocks:
                file.write(data.data)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    offset = _PREFIX.size + len(header)
    return Run(path, identities, checksums, offset, offset + len(blocks) * layout.block_bytes)


def read_run(path: Path, layout: BlockLayout) -> Run:
    """Reads a file's header. Raises DamagedRun, also when it belongs to another model or layout, and OSError."""
    with path.open("rb") as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise DamagedRun("it is too short")
        magic, length, checksum = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise DamagedRun("it is no KV run of this format")
        header = file.read(length) if length <= _MOST_HEADER_BYTES else b""
        size_bytes = os.fstat(file.fileno()).st_size
    if len(header) != length or zlib.crc32(header) != checksum:
        raise DamagedRun("its header is damaged")
    try:
        fields = json.loads(header)
        if fields["layout"] != asdict(layout):
            raise DamagedRun("it belongs to another model or layout")
        blocks = [(BlockIdentity(*map(bytes.fromhex, block[:3])), int(block[3])) for block in fields["blocks"]]
        contents = fields["contents"]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise DamagedRun(f"its header makes no sense ({type(error).__name__})") from None
    identities = tuple(identity for identity, _ in blocks)
    if not identities or contents != _digest(identities) or not all(identity.is_sound for identity in identities):
        raise DamagedRun("its blocks are not what they are said to be")
    offset = _PREFIX.size + length
    if size_bytes != offset + len(blocks) * layout.block_bytes:
        raise DamagedRun("it was cut off")
    return Run(path, identities, tuple(checksum for _, checksum in blocks), offset, size_bytes)


def read_block(descriptor: int, run: Run, index: int, out: BlockBytes) -> None:
    """Fills `out` with a block of an open file. Raises DamagedRun and OSError; `out` is then worth nothing."""
    if os.preadv(descriptor, [out.data], run.data_offset + index * out.nbytes) != out.nbytes:
        raise DamagedRun("it was cut off")
    if zlib.crc32(out.data) != run.checksums[index]:
        raise DamagedRun("a block's checksum is wrong")


def _digest(identities: Sequence[BlockIdentity]) -> str:
    digest = hashlib.sha256()
    for identity in identities:
        digest.update(identity.key)
    return digest.hexdigest()
