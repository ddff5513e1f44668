"""What the prefix cache holds of a prompt."""

from dataclasses import dataclass

from triptych.worker.engine.request import TokenizedPrompt
from triptych.worker.kv.blocks import BlockPool
from triptych.worker.kv.identity import BLOCK_TOKENS, identify_block, root_key


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the prefix cache holds of a prompt: leading tokens, and whether each image is among them."""

    cached_tokens: int
    images: tuple[bool, ...]


def coverage_of(pool: BlockPool, prompt: TokenizedPrompt, cache_salt: str) -> Coverage:
    """Tells what is cached now. Takes no reference."""
    key = root_key(cache_salt)
    cached_tokens = 0
    while cached_tokens + BLOCK_TOKENS < len(prompt.token_ids):
        identity = identify_block(key, prompt.token_ids, prompt.spans, cached_tokens)
        if not pool.match((identity,)):
            break
        key = identity.key
        cached_tokens += BLOCK_TOKENS
    return Coverage(cached_tokens, tuple(span.end <= cached_tokens for span in prompt.spans))
