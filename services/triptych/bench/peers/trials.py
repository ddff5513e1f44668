"""What is measured of every engine. To add a trial, name it in TRIALS."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from triptych.bench.benchmark import GoodputPlan
from triptych.bench.engine.limits import kv_bytes, prefill_flops, weight_bytes
from triptych.bench.goodput import Slo
from triptych.bench.pacing import Concurrency, Pacing, Rate
from triptych.bench.report import RoundReport
from triptych.bench.scenarios import Shape
from triptych.worker.model.config import DecoderConfig

TEMPLATE_TOKENS = 30
"""What the measured model's chat template adds to a prompt of one turn."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine could do at best, at the time: bytes a second, and floating-point operations a second."""

    bandwidth: float
    products: float


@dataclass(frozen=True, slots=True)
class Bar:
    """What we want to reach; None: nothing of the kind is wanted.

    Attributes:
        ratio: Times the best peer's figure.
        share: Of the limit.
        least: The figure itself.
    """

    ratio: float
    share: float | None = None
    least: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One kind of traffic and the figure that counts.

    Attributes:
        name: How the command line and the JSON call it.
        title: How tables call it.
        unit: Of the figure.
        better: Which figures win.
        scenario: From SCENARIOS.
        shape: Sizes.
        clients: Requests at once, unless there is a rate.
        requests: In a round.
        figure: The figure of a round; None when it has none.
        limit: The best figure that the machine allows, for a type; None when nobody has worked it out.
        bar: What is wanted, for equal types.
        goodput: Searches the highest rate inside these limits, and that is the figure; None: `clients` at once.
        rate: Requests a second at Poisson times, whether or not they are answered.
    """

    name: str
    title: str
    unit: str
    scenario: str
    shape: Shape
    clients: int
    requests: int
    figure: Callable[[RoundReport], float | None]
    bar: Bar
    better: Literal["higher", "lower"] = "higher"
    limit: Callable[[DecoderConfig, torch.dtype, Rates], float] | None = None
    goodput: GoodputPlan | None = None
    rate: float | None = None

    @property
    def pacing(self) -> Pacing:
        """How requests arrive."""
        return Concurrency(self.clients) if self.rate is None else Rate(self.rate)

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times as good our figure is as theirs."""
        return ours / theirs if self.better == "higher" else theirs / ours


def decode_rate(round_: RoundReport) -> float | None:
    """Tokens a second of one stream once it has begun: the inverse of the median TPOT."""
    figures = round_.figures
    return 1 / figures.tpot_s.p50 if figures.tpot_s else None


def prefill_rate(round_: RoundReport) -> float | None:
    """Prompt tokens a second, of the median time to first token; by the server's own count of the prompts."""
    figures = round_.figures
    if figures.ttft_s is None or not figures.prompt_tokens:
        return None
    return figures.prompt_tokens / figures.requests / figures.ttft_s.p50


def output_rate(round_: RoundReport) -> float | None:
    """Output tokens a second, of all streams together, prefill included."""
    return round_.figures.output_tokens_per_s or None


def decode_limit(config: DecoderConfig, dtype: torch.dtype, rates: Rates) -> float:
    """Tokens a second when weights and cache are read as fast as memory gives them; the answer is half made."""
    must = weight_bytes(config, dtype.itemsize) + kv_bytes(config, 32 + TEMPLATE_TOKENS + 64, dtype)
    return rates.bandwidth / must


def prefill_limit(config: DecoderConfig, dtype: torch.dtype, rates: Rates) -> float:
    """Prompt tokens a second when all products run at the machine's rate, whatever type gives it."""
    return 1024 * rates.products / prefill_flops(config, 1024)


def streams_limit(config: DecoderConfig, dtype: torch.dtype, rates: Rates) -> float:
    """Output tokens a second when 16 prompts are computed at the one rate, and 128 steps read at the other."""
    step = weight_bytes(config, dtype.itemsize) + kv_bytes(config, 16 * (256 + 64), dtype)
    seconds = 16 * prefill_flops(config, 256) / rates.products + 128 * step / rates.bandwidth
    return 16 * 128 / seconds


TRIALS = (
    Trial(
        "decode-1", "decode, one stream", "tokens/s", "text", Shape(32, 128), 1, 2, decode_rate,
        Bar(1.4, 0.7), limit=decode_limit,
    ),
    Trial(
        "prefill-1024", "prefill, 1,024 tokens", "tokens/s", "text", Shape(1024 - TEMPLATE_TOKENS, 1), 1, 3,
        prefill_rate, Bar(1.0, 0.95), limit=prefill_limit,
    ),
    Trial(
        "streams-16", "16 streams, 256 + 128 tokens", "tokens/s", "text", Shape(256 - TEMPLATE_TOKENS, 128), 16, 16,
        output_rate, Bar(1.2, 0.65), limit=streams_limit,
    ),
    Trial(
        "text-bursts", "texts and bursts of long ones, goodput", "requests/s", "text-bursts", Shape(128, 64), 1, 1,
        output_rate, Bar(1.5), goodput=GoodputPlan(Slo(3.0, 0.2), start_rate=0.5, max_rate=8, probe_s=16, max_probes=4),
    ),
)  # fmt: skip
