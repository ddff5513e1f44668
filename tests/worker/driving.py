"""Building engines and running requests through them, without a thread or a server."""

import hashlib
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from triptych.config import WorkerSettings
from triptych.errors import TriptychError
from triptych.visual_kv import VisualKvPolicy
from triptych.worker.engine.engine import Engine
from triptych.worker.engine.events import Completed, Failed, Text, Usage
from triptych.worker.engine.request import (
    FinishReason,
    GenerationRequest,
    PriorityClass,
    SamplingOptions,
    StoppingOptions,
)
from triptych.worker.engine.sequence import Sequence
from triptych.worker.loading import LoadedModel, load_model
from triptych.worker.prompt import ImageSlot, Turn

GREEDY = SamplingOptions()


def load(folder: Path, **settings: Any) -> LoadedModel:
    """Loads a checkpoint with settings fit for tests."""
    return load_model(WorkerSettings(model_dir=folder, device="cpu", threads=1, **{"kv_blocks": 256, **settings}))


def identity_of(name: object) -> bytes:
    """Returns the 256-bit identity of a picture known by a name."""
    return hashlib.sha256(repr(name).encode()).digest()


def ask(
    model: LoadedModel,
    *parts: str | tuple[object, int, Tensor | None],
    max_tokens: int = 8,
    sampling: SamplingOptions = GREEDY,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
    priority: PriorityClass = PriorityClass.STANDARD,
    cache_salt: str = "",
    visual_kv: VisualKvPolicy = VisualKvPolicy.EXACT,
) -> GenerationRequest:
    """Returns a request of one user message; an image is (name, token count, features or None)."""
    slots = tuple(part if isinstance(part, str) else ImageSlot(identity_of(part[0]), part[1]) for part in parts)
    return GenerationRequest(
        request_id="test",
        prompt=model.prompts.encode([Turn("user", slots)]),
        features=tuple(part[2] for part in parts if not isinstance(part, str)),
        sampling=sampling,
        stopping=StoppingOptions(max_tokens, stop, ignore_eos),
        priority=priority,
        cache_salt=cache_salt,
        visual_kv=visual_kv,
    )


@dataclass
class Answer:
    """What came out of a request."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reason: FinishReason | None = None
    usage: Usage | None = None
    completed: Completed | None = None
    error: TriptychError | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def cached_tokens(self) -> int:
        assert self.usage is not None
        return self.usage.cached_tokens


def drain(engine: Engine, sequences: Items[Sequence], check_each_step: bool = False) -> list[Answer]:
    """Steps until no work is left, and returns the answers of the given sequences."""
    answers = {sequence: Answer() for sequence in sequences}
    while engine.has_work:
        for sequence, event in engine.step():
            answer = answers.setdefault(sequence, Answer())
            if isinstance(event, Text):
                answer.texts.append(event.text)
            elif isinstance(event, Completed):
                answer.reason, answer.usage, answer.completed = event.reason, event.usage, event
            elif isinstance(event, Failed):
                answer.error = event.error
        if check_each_step:
            engine.check_integrity()
    for sequence, answer in answers.items():
        answer.tokens = sequence.token_ids[len(sequence.request.prompt.token_ids) :]
    engine.check_integrity()
    assert engine.load().used_blocks == 0
    return [answers[sequence] for sequence in sequences]


def run(engine: Engine, requests: Items[GenerationRequest], check_each_step: bool = False) -> list[Answer]:
    """Submits all requests at once and returns their answers."""
    return drain(engine, [engine.submit(request)[0] for request in requests], check_each_step)
