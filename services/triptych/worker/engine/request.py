"""What the engine is asked for: validated, tokenized, in plain types."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from torch import Tensor

from triptych.visual_kv import VisualKvPolicy
from triptych.worker.kv.identity import VisualSpan


class PriorityClass(IntEnum):
    """Who waits when not everybody can run; lower goes first."""

    INTERACTIVE = 0
    STANDARD = 1
    ECONOMY = 2


class FinishReason(Enum):
    """Why generation ended."""

    END = "end"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen. The defaults are greedy decoding.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keeps the k most likely tokens; 0 keeps all.
        top_p: Keeps the smallest set of tokens whose probability reaches this.
        repetition_penalty: Penalty for tokens already in prompt or output; 1 changes nothing.
        seed: Makes sampling repeatable; None draws a fresh one.
        top_logprobs: How many most likely tokens to report beside each chosen one; None reports nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StoppingOptions:
    """When to stop.

    Attributes:
        max_tokens: Most tokens to generate; > 0.
        stop: Strings before the first of which generation ends.
        ignore_eos: Generate past the end-of-sequence token.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as the decoder sees it.

    Attributes:
        token_ids: One id per position; the image token's id at visual ones. Not empty.
        spans: Where the images stand, in order.
    """

    token_ids: tuple[int, ...]
    spans: tuple[VisualSpan, ...] = ()

    @property
    def visual_tokens(self) -> int:
        """Positions that stand for image patches."""
        return sum(span.count for span in self.spans)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation.

    Attributes:
        request_id: Name for logs.
        prompt: What to answer.
        features: Per image of the prompt, projected features [count, hidden], or None when its KV should be cached.
        sampling: How tokens are chosen.
        stopping: When to stop.
        priority: Scheduling class.
        cache_salt: Separates tenants in the prefix cache.
        visual_kv: Where the KV of its images lives while it decodes. Anything but EXACT needs features for every image.
        arrival_ns: When the request reached the worker, nanoseconds since the epoch.
    """

    request_id: str
    prompt: TokenizedPrompt
    stopping: StoppingOptions
    features: tuple[Tensor | None, ...] = ()
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    priority: PriorityClass = PriorityClass.STANDARD
    cache_salt: str = ""
    visual_kv: VisualKvPolicy = VisualKvPolicy.EXACT
    arrival_ns: int = 0
