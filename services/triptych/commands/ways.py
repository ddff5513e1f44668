"""Ways of answering the same questions, side by side through a running stack.

One question at a time, each picture new to every cache, all ways right after one another: a machine that gets busy
slows them all.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from rich.console import Console
from rich.progress import track

from triptych import client
from triptych.commands.held_out import PICTURE_SIDE, converse, is_exact, service_at
from triptych.demo.scenes import held_out
from triptych.vision.draft_report import outcome_name

STAGES = ("encode", "reduce", "draft", "prefill", "time_to_first_token")


@dataclass(slots=True)
class Measured:
    """What one way gave.

    Attributes:
        visual_tokens: Of one picture in the prompt.
        right, asked: Exact answers and questions, all turns of all dialogues.
        seconds: By stage, of every first question; 0 for a stage that did not happen.
        outcomes: What became of drafts.
        similarities: Of the drafts that were compared, their tokens' mean.
    """

    visual_tokens: int = 0
    right: int = 0
    asked: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    outcomes: Counter[str] = field(default_factory=Counter)
    similarities: list[float] = field(default_factory=list)

    @property
    def exact(self) -> str:
        """The share of exact answers, for people."""
        return f"{100 * self.right / self.asked:.1f} % ({self.right}/{self.asked})"

    def median_ms(self, stage: str) -> float:
        """Returns the median of a stage; `encode` without the reduction that its own figure includes."""
        seconds = self.seconds[stage]
        if stage == "encode":
            seconds = [whole - part for whole, part in zip(seconds, self.seconds["reduce"], strict=True)]
        return 1e3 * median(seconds)

    def plain(self) -> dict[str, object]:
        """Returns all figures as plain values."""
        return {
            "visual_tokens": self.visual_tokens,
            "right": self.right,
            "asked": self.asked,
            "outcomes": dict(self.outcomes),
            "similarities": self.similarities,
            **{f"{stage}_ms": self.median_ms(stage) for stage in STAGES},
        }

    def add(self, answers: list[client.Answer], exact: list[bool]) -> None:
        """Counts one dialogue; times and drafts are those of its first question, whose picture no cache knows."""
        first = answers[0]
        self.visual_tokens = first.usage.visual_tokens
        self.right += sum(exact)
        self.asked += len(exact)
        for stage in STAGES:
            self.seconds[stage].append(first.stages.get(stage, 0.0))
        if first.finished.HasField("draft"):
            self.outcomes[outcome_name(first.finished.draft)] += 1
            if first.finished.draft.HasField("similarity"):
                self.similarities.append(first.finished.draft.similarity)


async def measure(count: int, address: str | None, ways: Mapping[str, client.Options]) -> dict[str, Measured]:
    """Asks about `count` held-out scenes in each way, at `address` or through a stack of its own."""
    console = Console(stderr=True)
    names = list(ways)
    measured = {name: Measured() for name in names}
    async with service_at(address, console) as service:
        for number, example in enumerate(track(held_out(count, size=PICTURE_SIDE), console=console)):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                # A salt of its own: nobody finds the picture in a cache because another way had seen it.
                answers = await converse(service, example, replace(ways[name], cache_salt=name))
                exact = [is_exact(answer, told) for answer, told in zip(answers, example.dialogue.turns, strict=True)]
                measured[name].add(answers, exact)
    return measured
