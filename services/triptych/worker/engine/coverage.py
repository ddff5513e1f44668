"""What the prefix cache holds of a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.worker.engine.request import TokenizedPrompt
from triptych.worker.kv.chain import Chain
from triptych.worker.kv.identity import BLOCK_TOKENS, BlockIdentity


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the KV cache holds of a prompt: leading tokens, and whether each image is among them."""

    cached_tokens: int
    images: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """A look into the KV cache for a prompt.

    Attributes:
        prompt: The prompt.
        chain: Its blocks' identities.
        blocks: How many leading blocks are there.
        cached_tokens: How many leading positions, those of a block's beginning included.
    """

    prompt: TokenizedPrompt
    chain: Chain
    blocks: int
    cached_tokens: int

    @classmethod
    def into(cls, prompt: TokenizedPrompt, cache_salt: str, holds: Callable[[BlockIdentity], bool]) -> "Look":
        """Looks for a prompt where `holds` tells what is there. Takes no reference."""
        chain = Chain(prompt.token_ids, prompt.spans, cache_salt)
        return cls(prompt, chain, 0, 0).further(
            lambda wanted: next((n for n, one in enumerate(wanted) if not holds(one)), len(wanted))
        )

    def further(self, count: Callable[[Sequence[BlockIdentity]], int]) -> "Look":
        """Looks for what is missing at another place, where `count` tells how many leading blocks are there."""
        full = self.chain.reusable()
        blocks = self.blocks + count(full[self.blocks :])
        parts = self.chain.parts(blocks)
        tokens = next((part.tokens for part in parts if count([part])), 0)
        return Look(self.prompt, self.chain, blocks, max(self.cached_tokens, blocks * BLOCK_TOKENS + tokens))

    @property
    def coverage(self) -> Coverage:
        """What that means for the prompt."""
        images = tuple(span.end <= self.cached_tokens for span in self.prompt.spans)
        return Coverage(self.cached_tokens, images)
