"""Small blocks whose bytes follow from their identity, so that a wrong one is always noticed."""

import hashlib
from collections.abc import Sequence

import numpy as np

from tests.worker.driving import identity_of
from triptych.worker.kv.identity import BLOCK_TOKENS, BlockIdentity, VisualSpan, identify_block, root_key
from triptych.worker.kv.layout import BlockLayout
from triptych.worker.kv.tiers.tier import BlockBytes, Tier

LAYOUT = BlockLayout(2, BLOCK_TOKENS, 2, 8, "float32", "a model")


def chain_of(name: int, blocks: int, visual: int = 0, salt: str = "") -> list[BlockIdentity]:
    """Returns the identities of a prompt whose first `visual` blocks are an image named like it."""
    token_ids = [1000 * name + place for place in range(blocks * BLOCK_TOKENS)]
    spans = [VisualSpan(0, visual * BLOCK_TOKENS, identity_of(name))] if visual else []
    chain: list[BlockIdentity] = []
    for index in range(blocks):
        parent = chain[-1].key if chain else root_key(salt)
        chain.append(identify_block(parent, token_ids, spans, index * BLOCK_TOKENS))
    return chain


def bytes_of(identity: BlockIdentity, layout: BlockLayout = LAYOUT) -> BlockBytes:
    """Returns the bytes that a block of this identity has: small finite floats."""
    seed = int.from_bytes(hashlib.sha256(identity.key).digest()[:8], "little")
    values = np.random.default_rng(seed).standard_normal(layout.block_bytes // 4, dtype=np.float32)
    return values.view(np.uint8)


def filled(identities: Sequence[BlockIdentity]) -> list[tuple[BlockIdentity, BlockBytes]]:
    """Returns blocks as `Tier.put` takes them."""
    return [(identity, bytes_of(identity)) for identity in identities]


def found(tier: Tier, identities: Sequence[BlockIdentity]) -> int:
    """Returns how many leading blocks a tier gives, after comparing every byte."""
    outs = [np.zeros(LAYOUT.block_bytes, dtype=np.uint8) for _ in identities]
    count = tier.get(identities, outs)
    for identity, out in zip(identities[:count], outs, strict=False):
        assert np.array_equal(out, bytes_of(identity))
    tier.check_integrity()
    return count
