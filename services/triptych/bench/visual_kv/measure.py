"""Measures the policies in process: decode speed and memory under load, and how far the next token's logits move."""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from triptych.bench.statistics import Spread, spread_of
from triptych.bench.visual_kv.material import Material, pictures
from triptych.config import WorkerSettings
from triptych.visual_kv import VisualKvPolicy
from triptych.worker.calibration import fit_basis
from triptych.worker.engine.request import GenerationRequest, StoppingOptions, TokenizedPrompt
from triptych.worker.engine.sequence import Phase
from triptych.worker.engine.sequence import Sequence as Running
from triptych.worker.kv.blocks import blocks_for
from triptych.worker.kv.cache import block_bytes
from triptych.worker.kv.identity import VisualSpan
from triptych.worker.loading import LoadedModel, load_model
from triptych.worker.model.step import SequenceRows, StepBackend, StepResult

VISUAL_TOKENS = 576
"""One picture of a ViT-L/14 at 336 pixels."""
BEFORE, AFTER = 16, 48
"""Text tokens in front of it and behind it."""
MATERIALS: tuple[Material, ...] = ("words", "noise")
_CALIBRATION_PICTURES = 12
_DECODE_STEPS = 24
_ROUNDS = 4


class LogitError(BaseModel):
    """How the next token's logits differ from those over exact visual KV, over several pictures and places."""

    model_config = ConfigDict(frozen=True)

    material: Material
    relative: Annotated[float, Field(description="root mean square of the difference / of the centred exact logits")]
    divergence: Annotated[float, Field(description="Kullback-Leibler divergence from exact, nats, mean")]
    same_token: Annotated[float, Field(description="share of places where the likeliest token stays")]


class PolicyFigures(BaseModel):
    """One policy at one shape."""

    model_config = ConfigDict(frozen=True)

    policy: VisualKvPolicy
    saved_bytes: Annotated[int, Field(description="device memory a sequence gives back")]
    kv_bytes: Annotated[int, Field(description="device memory of its visual KV before")]
    set_aside_s: Annotated[float, Field(description="once a sequence, in the engine's thread")]
    decode_s: Annotated[dict[int, Spread], Field(description="seconds a step, by sequences")]
    speed: Annotated[dict[int, Spread], Field(description="tokens per second / exact's, by sequences")]
    errors: list[LogitError]


class RecordingBackend:
    """Passes steps on and keeps the last one's logits."""

    def __init__(self, backend: StepBackend) -> None:
        self.backend = backend
        self.input_dtype = backend.input_dtype
        self.logits: Tensor | None = None

    def start(
        self, embedded: Tensor, sequences: Sequence[SequenceRows], *, logits: bool = True, greedy: bool = False
    ) -> Callable[[], StepResult]:
        """As `StepBackend`, with logits always."""
        finish = self.backend.start(embedded, sequences, logits=True, greedy=greedy)

        def keep() -> StepResult:
            result = finish()
            self.logits = result.logits
            return result

        return keep


def measure(
    model_dir: Path, dtype: str, ratio: int, sequences: Sequence[int], places: int, progress: Callable[[str], None]
) -> list[PolicyFigures]:
    """Runs every policy on a language model that is shown VISUAL_TOKENS rows in place of a picture.

    Args:
        model_dir: A checkpoint's folder; its vision part, if it has one, is not used.
        dtype: Of weights and cache.
        ratio: How many times smaller compressed visual KV is.
        sequences: How many decode at once, each measured.
        places: How many next tokens logits are compared at, for each material.
        progress: Is told what is being measured.
    """
    errors: dict[VisualKvPolicy, list[LogitError]] = {policy: [] for policy in VisualKvPolicy}
    plain = _load(model_dir, dtype, ratio, max(sequences), None)
    with TemporaryDirectory() as scratch:
        for material in MATERIALS:
            progress(f"fitting components to {material}")
            shown = islice(pictures(plain, material, VISUAL_TOKENS, seed=0), _CALIBRATION_PICTURES)
            file = Path(scratch) / material
            fit_basis(plain, ((_prompt(plain, 0, 0), rows) for rows in shown)).save(file, plain.fingerprint)
            model = _load(model_dir, dtype, ratio, max(sequences), file)
            progress(f"comparing logits over {material}")
            for policy, error in _errors(model, material, places).items():
                errors[policy].append(error)
        return [
            PolicyFigures(policy=policy, errors=errors[policy], **figures)
            for policy, figures in _speeds(model, sequences, progress).items()
        ]


def _load(model_dir: Path, dtype: str, ratio: int, sequences: int, basis: Path | None) -> LoadedModel:
    settings: dict[str, Any] = {
        "model_dir": model_dir,
        "device": "cpu",
        "dtype": dtype,
        "kv_blocks": (sequences + 4) * blocks_for(BEFORE + VISUAL_TOKENS + AFTER + 2 * _DECODE_STEPS),
        "visual_kv_ratio": ratio,
        "visual_kv_basis": basis,
    }
    return load_model(WorkerSettings.model_validate(settings))


def _prompt(model: LoadedModel, picture: int, after: int) -> TokenizedPrompt:
    """Returns text, a picture and `after` more tokens of text."""
    text = tuple(index % model.config.decoder.vocabulary for index in range(1000, 1000 + BEFORE + after))
    span = VisualSpan(BEFORE, VISUAL_TOKENS, picture.to_bytes(32, "big"))
    return TokenizedPrompt((*text[:BEFORE], *[0] * VISUAL_TOKENS, *text[BEFORE:]), (span,))


def _submit(model: LoadedModel, policy: VisualKvPolicy, prompt: TokenizedPrompt, rows: Tensor, tokens: int) -> Running:
    stopping = StoppingOptions(tokens, ignore_eos=True)
    features = (rows.to(model.dtype),)
    request = GenerationRequest("bench", prompt, stopping, features, visual_kv=policy)
    return model.engine.submit(request)[0]


def _errors(model: LoadedModel, material: Material, places: int) -> dict[VisualKvPolicy, LogitError]:
    """Compares the logits of the second new token, the first that is computed beside set-aside KV."""
    recorder = RecordingBackend(model.engine.runner.backend)
    shown = pictures(model, material, VISUAL_TOKENS, seed=1)
    found: dict[VisualKvPolicy, list[Tensor]] = {policy: [] for policy in VisualKvPolicy}
    model.engine.runner.backend = recorder
    for place in range(places):
        rows = next(shown)
        prompt = _prompt(model, place + 1, 1 + place * AFTER // places)
        for policy, logits in found.items():
            _submit(model, policy, prompt, rows, 2)
            while model.engine.has_work:
                model.engine.step()
            if recorder.logits is not None:
                logits.append(recorder.logits[0] - recorder.logits[0].mean())
    model.engine.runner.backend = recorder.backend
    exact = torch.stack(found[VisualKvPolicy.EXACT])
    return {policy: _compare(material, exact, torch.stack(logits)) for policy, logits in found.items()}


def _compare(material: Material, exact: Tensor, other: Tensor) -> LogitError:
    log_exact, log_other = exact.log_softmax(-1), other.log_softmax(-1)
    return LogitError(
        material=material,
        relative=float((other - exact).norm() / exact.norm()),
        divergence=float((log_exact.exp() * (log_exact - log_other)).sum(-1).mean()),
        same_token=float((exact.argmax(-1) == other.argmax(-1)).float().mean()),
    )


def _speeds(
    model: LoadedModel, sequences: Sequence[int], progress: Callable[[str], None]
) -> dict[VisualKvPolicy, dict[str, Any]]:
    """Times decode steps, all policies in turn in every round: a machine that gets busy slows them all."""
    rows = list(islice(pictures(model, "noise", VISUAL_TOKENS, seed=2), max(sequences)))
    steps: dict[VisualKvPolicy, dict[int, list[float]]] = {p: {n: [] for n in sequences} for p in VisualKvPolicy}
    aside: dict[VisualKvPolicy, list[float]] = {policy: [] for policy in VisualKvPolicy}
    saved: dict[VisualKvPolicy, int] = {}
    for number in range(_ROUNDS + 1):
        for count in sequences:
            progress(f"decode, {count} sequences, round {number} of {_ROUNDS}")
            for policy in VisualKvPolicy:
                first_s, step_s, saved[policy] = _decode(model, policy, rows[:count])
                if number:  # The first one computes the pictures that the others find in the prefix cache.
                    steps[policy][count].append(step_s)
                    aside[policy].append(max(0.0, first_s - step_s) / count)
    exact = steps[VisualKvPolicy.EXACT]
    kv_bytes = blocks_for(VISUAL_TOKENS) * block_bytes(model.config.decoder, model.dtype)
    return {
        policy: {
            "saved_bytes": saved[policy],
            "kv_bytes": kv_bytes,
            "set_aside_s": 0.0 if policy is VisualKvPolicy.EXACT else spread_of(aside[policy]).median,
            "decode_s": {count: spread_of(times) for count, times in own.items()},
            "speed": {
                count: spread_of([a / b for a, b in zip(exact[count], times, strict=True)])
                for count, times in own.items()
            },
        }
        for policy, own in steps.items()
    }


def _decode(model: LoadedModel, policy: VisualKvPolicy, rows: list[Tensor]) -> tuple[float, float, int]:
    """Returns seconds of the first decode step, the median of later ones, and device bytes saved per sequence."""
    engine = model.engine
    running = [
        _submit(model, policy, _prompt(model, -index % 2**64, AFTER), one, 2 * _DECODE_STEPS)
        for index, one in enumerate(rows, 1)
    ]
    while any(sequence.phase is not Phase.DECODE for sequence in running):
        engine.step()
    times = []
    for _ in range(_DECODE_STEPS):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    saved = running[0].saved_bytes
    for sequence in running:
        engine.cancel(sequence)
    return times[0], median(times[1:]), saved
