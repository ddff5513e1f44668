"""Times decode, prefill and mixed steps, each sample beside a sample of its limit and of the control."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from triptych.bench.engine.control import Transformers
from triptych.bench.engine.driving import Driver
from triptych.bench.engine.limits import Bandwidth, ProductRate, kv_bytes, prefill_flops, weight_bytes
from triptych.bench.statistics import Spread, spread_of

CACHED_TOKENS = 256
"""Prompt of every sequence that decodes."""
MIXED_DECODES = 16

# Beyond these, the control would take most of the run.
_MOST_CONTROLLED_SEQUENCES = 16
_MOST_CONTROLLED_TOKENS = 1024


class Figure(BaseModel):
    """One kind of step."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["decode", "prefill", "mixed"]
    size: Annotated[int, Field(description="decode, mixed: sequences; prefill: tokens")]
    seconds: Annotated[Spread, Field(description="a step; prefill: all steps to the first token")]
    tokens_per_s: Annotated[Spread, Field(description="tokens computed a second")]
    limit_s: Annotated[Spread, Field(description="the least time for what must be read, or computed")]
    share_of_limit: Annotated[Spread, Field(description="limit / seconds, of samples taken one after the other")]
    loop_share: Annotated[Spread, Field(description="part of a step while no arithmetic runs")]
    ratio_to_transformers: Annotated[Spread | None, Field(description="its seconds / ours; None: not measured")]


class Plan(BaseModel):
    """What to measure."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model_dir: Path
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    weights: Literal["auto", "int8"] = "auto"
    threads: int | None = None
    sequences: tuple[int, ...] = (1, 4, 16, 64)
    prompts: tuple[int, ...] = (256, 1024, 4096)
    samples: int = 15
    control: bool = True


def measure(plan: Plan, progress: Callable[[str], None]) -> list[Figure]:
    """Runs the plan; `progress` is told what is being measured. Raises what loading a checkpoint does."""
    decoding = max((*plan.sequences, MIXED_DECODES), default=1)
    room = decoding * (CACHED_TOKENS + _longest_answer(decoding, plan) + 16) + max(plan.prompts, default=0) + 4096
    driver = Driver(plan.model_dir, plan.dtype, plan.weights, plan.threads, room)
    bench = _Bench(driver, plan)
    figures = []
    for count in plan.sequences:
        progress(f"decode, {count} sequences")
        figures.append(bench.decode(count))
    fits = [tokens for tokens in plan.prompts if tokens < driver.model.engine.context_tokens]
    for tokens in fits:
        progress(f"prefill, {tokens} tokens")
        figures.append(bench.prefill(tokens))
    progress(f"mixed, {MIXED_DECODES} sequences and a prompt")
    figures.append(bench.mixed())
    return figures


class _Bench:
    def __init__(self, driver: Driver, plan: Plan) -> None:
        self._driver = driver
        self._plan = plan
        self._config = driver.model.config.decoder
        self._bandwidth = Bandwidth(torch.get_num_threads())
        self._products = ProductRate(self._config)
        self._control = Transformers(plan.model_dir, self._products.dtype) if plan.control else None
        self._weight_bytes = weight_bytes(self._config, driver.bytes_per_weight)

    def decode(self, count: int) -> Figure:
        driver = self._driver
        control = self._control if count <= _MOST_CONTROLLED_SEQUENCES else None
        for _ in range(count):
            driver.start(CACHED_TOKENS, _longest_answer(count, self._plan))
        driver.decode_all()
        driver.step()
        if control is not None:
            control.prefill(count, CACHED_TOKENS)
            control.decode()
        samples = []
        for _ in range(self._plan.samples):
            must = self._weight_bytes + self._cached_bytes()
            limit = must / self._bandwidth.measure()
            samples.append((*driver.step(), limit, control.decode() if control else None))
        driver.stop_all()
        return _figure("decode", count, count, samples)

    def prefill(self, tokens: int) -> Figure:
        control = self._control if tokens <= _MOST_CONTROLLED_TOKENS else None
        samples = []
        for _ in range(max(3, self._plan.samples // 4)):
            limit = prefill_flops(self._config, tokens) / self._products.measure()
            self._driver.start(tokens, 2)
            seconds = arithmetic = 0.0
            while self._driver.running[0].output_tokens == 0:
                step, inner = self._driver.step()
                seconds, arithmetic = seconds + step, arithmetic + inner
            self._driver.stop_all()
            samples.append((seconds, arithmetic, limit, control.prefill(1, tokens) if control else None))
        return _figure("prefill", tokens, tokens, samples)

    def mixed(self) -> Figure:
        """Steps full to the token budget: decodes and a piece of a long prompt. The slower of both limits counts."""
        driver = self._driver
        for _ in range(MIXED_DECODES):
            driver.start(CACHED_TOKENS, _longest_answer(MIXED_DECODES, self._plan))
        driver.decode_all()
        samples = []
        chunk = 0
        for _ in range(max(3, self._plan.samples // 4)):
            prompt = driver.start(1024, 1)
            computed = prompt.computed
            rate, bandwidth = self._products.measure(), self._bandwidth.measure()
            seconds, arithmetic = driver.step()
            chunk = prompt.computed - computed
            flops = prefill_flops(self._config, chunk) + MIXED_DECODES * prefill_flops(self._config, 1)
            least = max(flops / rate, (self._weight_bytes + self._cached_bytes()) / bandwidth)
            samples.append((seconds, arithmetic, least, None))
            driver.model.engine.cancel(driver.running.pop())
        driver.stop_all()
        return _figure("mixed", MIXED_DECODES, MIXED_DECODES + chunk, samples)

    def _cached_bytes(self) -> int:
        tokens = sum(len(sequence.token_ids) for sequence in self._driver.running)
        return kv_bytes(self._config, tokens, self._driver.model.dtype)


def _longest_answer(count: int, plan: Plan) -> int:
    """Tokens that the first of `count` sequences generates while the others' prompts are computed, and after that."""
    return count + plan.samples + 16


def _figure(
    kind: Literal["decode", "prefill", "mixed"],
    size: int,
    tokens: int,
    samples: Sequence[tuple[float, float, float, float | None]],
) -> Figure:
    ratios = [control / seconds for seconds, _, _, control in samples if control is not None]
    return Figure(
        kind=kind,
        size=size,
        seconds=spread_of([seconds for seconds, *_ in samples]),
        tokens_per_s=spread_of([tokens / seconds for seconds, *_ in samples]),
        limit_s=spread_of([limit for _, _, limit, _ in samples]),
        share_of_limit=spread_of([limit / seconds for seconds, _, limit, _ in samples]),
        loop_share=spread_of([1 - arithmetic / seconds for seconds, arithmetic, *_ in samples]),
        ratio_to_transformers=spread_of(ratios) if ratios else None,
    )
