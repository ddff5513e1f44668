"""What a block of KV is the KV of: a hash chain over positions, in which an image counts by its identity.

The KV of a position depends on everything before it, so a block's key hashes its own content and its parent's key.
Key equality is 256 bits of SHA-256; content is kept beside it and compared on every hit all the same.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
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
    """Identity of a block, or of its first positions where an image ends within it.

    Attributes:
        key: SHA-256 over `parent` and `content`.
        parent: Key of the block before, or the chain's root.
        content: The block's positions, encoded without ambiguity.
    """

    key: bytes
    parent: bytes
    content: bytes

    @classmethod
    def of(cls, parent: bytes, content: bytes) -> "BlockIdentity":
        """Returns the identity of `content` behind `parent`."""
        return cls(hashlib.sha256(parent + content).digest(), parent, content)

    @property
    def is_sound(self) -> bool:
        """Whether the key is that of parent and content: what was read from elsewhere may be damaged."""
        return self.key == hashlib.sha256(self.parent + self.content).digest()

    @property
    def tokens(self) -> int:
        """How many leading positions of the block it stands for; BLOCK_TOKENS for a full one."""
        return sum(count for count, _ in _runs(self.content))

    @property
    def is_visual(self) -> bool:
        """Whether at least half of its positions belong to images."""
        return 2 * sum(count for count, image in _runs(self.content) if image is not None) >= self.tokens

    @property
    def images(self) -> tuple[bytes, ...]:
        """Identities of the images it holds positions of."""
        return tuple(image for _, image in _runs(self.content) if image is not None)


def root_key(cache_salt: str) -> bytes:
    """Returns where a tenant's chains begin; chains with different salts never meet."""
    return hashlib.sha256(b"triptych kv chain\0" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def identify_block(
    parent: bytes, token_ids: Sequence[int], spans: Sequence[VisualSpan], start: int, tokens: int = BLOCK_TOKENS
) -> BlockIdentity:
    """Identifies the block at `start`, or its first `tokens` positions.

    Args:
        parent: Key of the block before, or `root_key`.
        token_ids: The whole sequence; ids at visual positions do not matter.
        spans: All its images, in order, disjoint.
        start: A multiple of BLOCK_TOKENS.
        tokens: 1 to BLOCK_TOKENS.
    """
    return BlockIdentity.of(parent, _encode(token_ids, spans, start, start + tokens))


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


def _runs(content: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Yields the length of each run of positions, and whose image it is; reads what `_encode` wrote."""
    place = 0
    while place < len(content):
        count = content[place + 1]
        if content[place : place + 1] == b"V":
            yield count, content[place + 2 : place + 34]
            place += 38
        else:
            yield count, None
            place += 2 + 4 * count
