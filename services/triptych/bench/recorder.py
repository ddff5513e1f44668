"""What happened to one request, and the latencies that follow from it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class Record:
    """One request's times, all in seconds since the round began, by one monotonic clock.

    Attributes:
        label: Kind of request.
        turn: Which turn of its conversation, from 0.
        due_s: When it should have been sent.
        sent_s: When it was sent.
        pieces_s: When each piece of text arrived; tokens that come in one piece count as one.
        ended_s: When the answer was complete, or had failed.
        output_tokens: Generated tokens, by the server's own count where it gives one.
        prompt_tokens: Prompt tokens by the server's count; None when it gives none.
        counted: Whether `output_tokens` is the server's count; else it is the number of pieces.
        error: Kind of failure; empty for a complete answer.
    """

    label: str
    turn: int
    due_s: float
    sent_s: float
    pieces_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int | None = None
    counted: bool = False
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from sending to the first piece of text; None without one."""
        return self.pieces_s[0] - self.sent_s if self.pieces_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (end - first piece) / (tokens - 1); None below two tokens.

        To the end, not to the last piece: tokens without text of their own come last and take time, too.
        """
        if not self.pieces_s or self.output_tokens < 2:
            return None
        return (self.ended_s - self.pieces_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between one piece and the next."""
        return [later - earlier for earlier, later in pairwise(self.pieces_s)]

    @property
    def latency_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s

    @property
    def lag_s(self) -> float:
        """How late this client sent it: its own overhead, not the server's."""
        return self.sent_s - self.due_s


class Recorder:
    """Fills one Record while its request runs."""

    def __init__(self, record: Record, clock: Callable[[], float]) -> None:
        self.record = record
        self._clock = clock
        self._tokens = 0

    def piece(self, tokens: int) -> None:
        """Notes that text arrived; `tokens` is what the server says it stands for, 1 where it does not say."""
        self.record.pieces_s.append(self._clock())
        self._tokens += tokens

    def usage(self, prompt_tokens: int | None, output_tokens: int) -> None:
        """Notes the server's own counts."""
        self.record.prompt_tokens = prompt_tokens
        self.record.output_tokens = output_tokens
        self.record.counted = True

    def end(self, error: str = "") -> None:
        """Notes the end; without the server's count, tokens are what the pieces said."""
        self.record.ended_s = self._clock()
        self.record.error = error
        if not self.record.counted:
            self.record.output_tokens = self._tokens
