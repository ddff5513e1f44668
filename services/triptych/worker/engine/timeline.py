"""When each stage of a request happened, as plain records. Times are nanoseconds since the epoch."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """One prefill chunk.

    Attributes:
        start_ns: Start of the step that computed it.
        end_ns: End of that step.
        tokens: Positions computed.
        visual_tokens: How many of them are visual.
        cached_tokens: Positions before the chunk that came from the prefix cache; 0 for all but the first chunk.
    """

    start_ns: int
    end_ns: int
    tokens: int
    visual_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Timeline:
    """The stages of one request. The engine writes it; it may be read once the request has ended.

    Attributes:
        arrival_ns: The request reached the worker.
        chunks: Prefill chunks, in order; also those that recomputed what a preemption dropped.
        first_token_ns: The first token was known; None until then.
        last_token_ns: The latest token was known; None until then.
    """

    arrival_ns: int
    chunks: list[ChunkRecord] = field(default_factory=list)
    first_token_ns: int | None = None
    last_token_ns: int | None = None

    def token_at(self, now_ns: int) -> None:
        """Notes that a token became known."""
        if self.first_token_ns is None:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns
