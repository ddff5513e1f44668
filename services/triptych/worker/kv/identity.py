"""What a block of KV is the KV of: a hash chain over positions, in which an image counts by its identity.

The KV of a position depends on everything before it, so a block's key hashes its own content and its parent's key.
Key equality is 256 bits of SHA-256; content is kept beside it and compared on every hit all the same.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class VisualSpan:
    """The positions one image takes in a prompt.

    Attributes:
        start: First position.
        count: How many; > 0.
        identity: 256-bit identity of the image; equal identities mean equal features.
    """

    start: int
    count: int
    identity: bytes

    @property
    def end(self) -> int:
        """First position behind the image."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """Identity of a full block.

    Attributes:
        key: SHA-256 over `parent` and `content`.
        parent: Key of the block before, or the chain's root.
        content: The block's positions, encoded without ambiguity.
    """

    key: bytes
    parent: bytes
    content: bytes


def root_key(cache_salt: str) -> bytes:
    """Returns where a tenant's chains begin; chains with different salts never meet."""
    return hashlib.sha256(b"triptych kv chain\0" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def identify_block(parent: bytes, token_ids: Sequence[int], spans: Sequence[VisualSpan], start: int) -> BlockIdentity:
    """Identifies the full block of positions `start` to `start + BLOCK_TOKENS`.

    Args:
        parent: Key of the block before, or `root_key`.
        token_ids: The whole sequence; ids at visual positions do not matter.
        spans: All its images, in order, disjoint.
        start: A multiple of BLOCK_TOKENS.
    """
    content = _encode(token_ids, spans, start, start + BLOCK_TOKENS)
    return BlockIdentity(hashlib.sha256(parent + content).digest(), parent, content)


def _encode(token_ids: Sequence[int], spans: Sequence[VisualSpan], start: int, end: int) -> bytes:
    """Encodes positions as runs: a tag and a length, then token ids, or an image's identity and first index."""
    parts: list[bytes] = []
    position = start

    def add_text(stop: int) -> None:
        if stop > position:
            parts.append(struct.pack(f"<cB{stop - position}I", b"T", stop - position, *token_ids[position:stop]))

    for span in spans:
        if span.end <= position or span.start >= end:
            continue
        add_text(span.start)
        position = max(position, span.start)
        stop = min(span.end, end)
        parts.append(struct.pack("<cB32sI", b"V", stop - position, span.identity, position - span.start))
        position = stop
    add_text(end)
    return b"".join(parts)
