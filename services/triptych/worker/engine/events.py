"""What the engine tells about a request."""

from dataclasses import dataclass

from triptych.errors import TriptychError
from triptych.visual_kv import VisualKvPolicy
from triptych.worker.engine.logprobs import TokenChoice
from triptych.worker.engine.request import FinishReason
from triptych.worker.engine.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts.

    Attributes:
        text_tokens: Prompt tokens that stand for text.
        visual_tokens: Prompt tokens that stand for image patches.
        cached_tokens: Prompt tokens of either kind whose KV came from the prefix cache.
        output_tokens: Generated tokens, a final end-of-sequence token included.
    """

    text_tokens: int
    visual_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Queued:
    """The request was checked and queued."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Text:
    """New text, never empty, how many tokens it accounts for, and how likely these were where the request asks."""

    text: str
    token_count: int
    choices: tuple[TokenChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """The request ended as it should; nothing follows.

    Attributes:
        reason: Why.
        usage: Token counts.
        timeline: When its stages happened.
        visual_kv: Policy under which tokens were chosen; EXACT where none took effect.
        saved_bytes: Device memory that the policy saved while tokens were chosen, at most.
    """

    reason: FinishReason
    usage: Usage
    timeline: Timeline
    visual_kv: VisualKvPolicy = VisualKvPolicy.EXACT
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error; nothing follows. `timeline` is None when it was never queued."""

    error: TriptychError
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class Retracted:
    """All text told so far is void: it was made from draft features that were not kept. The right text follows."""


Event = Queued | Text | Completed | Failed | Retracted


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's state, as counts.

    Attributes:
        waiting: Requests admitted to the queue that do not run.
        running: Requests in prefill or decode.
        total_blocks: KV blocks in the pool.
        used_blocks: KV blocks referenced by requests.
        cached_blocks: Unreferenced KV blocks kept for reuse.
    """

    waiting: int
    running: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
