"""What guessing tokens brings: the same answers with and without, timed in turn."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from triptych.bench.statistics import Spread, spread_of
from triptych.config import WorkerSettings
from triptych.errors import TriptychError
from triptych.worker.engine.request import GenerationRequest, StoppingOptions
from triptych.worker.loading import LoadedModel, load_model
from triptych.worker.prompt import Turn

_TEXT = (
    "The harbour opens at six. Boats longer than twelve metres wait at the outer pier until the master of the port "
    "calls them; smaller boats may enter at once. Fish is weighed on the scales beside the ice house, and the weight "
    "is written into the book of the day. Nobody may leave the harbour before the weight is written."
)
PROMPTS = {
    "repeat a text": f"Repeat this text exactly:\n\n{_TEXT}",
    "correct a text": f"Correct the spelling of this text and return all of it:\n\n{_TEXT}",
    "write a story": "Write a short story about a harbour.",
}
_MOST_TOKENS = 120


class Gain(BaseModel):
    """One prompt's greedy answer, prefill left out."""

    model_config = ConfigDict(frozen=True)

    prompt: str
    tokens: Annotated[int, Field(description="tokens of the answer, the same both times")]
    steps: Annotated[int, Field(description="steps with guesses; without, one a token")]
    guessed: Annotated[int, Field(description="tokens guessed")]
    confirmed: Annotated[int, Field(description="how many of them were right")]
    seconds_without: Spread
    seconds_with: Spread
    ratio: Annotated[Spread, Field(description="without / with, of answers timed one after the other")]


class Guessing(BaseModel):
    """How tokens are guessed."""

    model_config = ConfigDict(frozen=True)

    guesses: Annotated[int, Field(description="most tokens guessed at once")] = 7
    draft_model: Annotated[Path | None, Field(description="checkpoint that guesses; None: earlier text")] = None
    draft_weights: Annotated[Literal["auto", "int8"], Field(description="its weights; auto: as the model's")] = "auto"


def measure_gain(
    model_dir: Path, dtype: str, guessing: Guessing, samples: int, progress: Callable[[str], None]
) -> list[Gain]:
    """Answers every prompt `samples` times each way.

    Raises TriptychError if an answer differs, and what loading a checkpoint does.
    """
    plain = _load(model_dir, dtype)
    drafted = _load(
        model_dir,
        dtype,
        speculative_tokens=guessing.guesses,
        draft_model=guessing.draft_model,
        draft_weights=guessing.draft_weights,
    )
    found = []
    for name, prompt in PROMPTS.items():
        progress(name)
        pairs = [(_answer(plain, prompt), _answer(drafted, prompt)) for _ in range(samples)]
        if any(without.tokens != with_.tokens for without, with_ in pairs):
            raise TriptychError(f"guessing changed the answer to {name!r}: a fault in the engine")
        without, with_ = ([pair[way].seconds for pair in pairs] for way in (0, 1))
        found.append(
            Gain(
                prompt=name,
                tokens=len(pairs[0][0].tokens),
                steps=pairs[0][1].steps,
                guessed=pairs[0][1].guessed,
                confirmed=pairs[0][1].confirmed,
                seconds_without=spread_of(without),
                seconds_with=spread_of(with_),
                ratio=spread_of([a / b for a, b in zip(without, with_, strict=True)]),
            )
        )
    return found


class _Answer(BaseModel):
    tokens: tuple[int, ...]
    steps: int
    guessed: int
    confirmed: int
    seconds: float


def _load(model_dir: Path, dtype: str, **more: object) -> LoadedModel:
    settings = {"model_dir": model_dir, "device": "cpu", "dtype": dtype, "kv_blocks": 256, "prefix_cache": False}
    return load_model(WorkerSettings.model_validate({**settings, **more}))


def _answer(model: LoadedModel, prompt: str) -> _Answer:
    engine = model.engine
    tokenized = model.prompts.encode([Turn("user", (prompt,))])
    sequence, _ = engine.submit(GenerationRequest("bench", tokenized, StoppingOptions(_MOST_TOKENS)))
    while not sequence.output_tokens:
        engine.step()
    guessed, confirmed = engine.guessed_tokens, engine.confirmed_tokens
    steps, begin = 0, time.perf_counter()
    while engine.has_work:
        engine.step()
        steps += 1
    seconds = time.perf_counter() - begin
    return _Answer(
        tokens=tuple(sequence.token_ids[len(tokenized.token_ids) :]),
        steps=steps,
        guessed=engine.guessed_tokens - guessed,
        confirmed=engine.confirmed_tokens - confirmed,
        seconds=seconds,
    )
