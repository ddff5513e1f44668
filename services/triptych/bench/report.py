"""What a benchmark found, as one JSON document; `triptych bench schema` prints its JSON Schema."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from triptych.bench.driver import Round
from triptych.bench.recorder import Record
from triptych.bench.statistics import Distribution, Spread, distribution, spread


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Figures(_Part):
    """Statistics of the requests of one round, or of one label in it. Latencies are those of complete answers."""

    requests: int
    errors: Annotated[dict[str, int], Field(description="failed requests by kind")]
    duration_s: Annotated[float, Field(description="from the first sending to the last end")]
    requests_per_s: Annotated[float, Field(description="complete answers a second")]
    output_tokens_per_s: Annotated[float, Field(description="tokens of complete answers a second")]
    output_tokens: int
    prompt_tokens: Annotated[int | None, Field(description="by the servers' count; None when one gave none")]
    counted: Annotated[float, Field(description="share of answers whose tokens the server counted; else pieces count")]
    ttft_s: Annotated[Distribution | None, Field(description="sending to first text")]
    tpot_s: Annotated[Distribution | None, Field(description="(end - first text) / (tokens - 1), per request")]
    itl_s: Annotated[Distribution | None, Field(description="gaps between pieces of text, of all requests together")]
    latency_s: Annotated[Distribution | None, Field(description="sending to end")]


class Overhead(_Part):
    """What the client itself cost; when these grow, the figures measure the client."""

    cpu_share: Annotated[float, Field(description="the client's processor seconds per second, 1 = one core")]
    loop_lag_s: Annotated[Distribution | None, Field(description="how late its event loop ran a timer")]
    send_lag_s: Annotated[Distribution | None, Field(description="how late requests were sent")]


class RequestRow(_Part):
    """One request."""

    label: str
    turn: int
    sent_s: Annotated[float, Field(description="since the round began")]
    ttft_s: float | None
    tpot_s: float | None
    latency_s: float
    output_tokens: int
    error: str


class RoundReport(_Part):
    """One round against one server."""

    seed: int
    figures: Figures
    by_label: Annotated[dict[str, Figures], Field(description="only where a scenario has several labels")]
    client: Overhead
    requests: list[RequestRow]


class Summary(_Part):
    """The rounds together: of each round's figure, median, smallest and largest."""

    errors: Annotated[int, Field(description="failed requests of all rounds")]
    output_tokens_per_s: Spread | None
    requests_per_s: Spread | None
    ttft_p50_s: Spread | None
    ttft_p99_s: Spread | None
    tpot_p50_s: Spread | None
    tpot_p99_s: Spread | None
    itl_p99_s: Spread | None
    latency_p50_s: Spread | None
    latency_p99_s: Spread | None


class Probe(_Part):
    """One rate that the goodput search tried."""

    rate: float
    met: bool
    figures: Figures


class Goodput(_Part):
    """The highest rate inside the limits."""

    ttft_p99_limit_s: float
    tpot_p99_limit_s: float
    requests_per_s: Annotated[float, Field(description="0: not even the lowest rate that was tried was inside")]
    probes: list[Probe]


class Result(_Part):
    """One scenario against one server."""

    scenario: str
    server: str
    model: str
    pacing: str
    summary: Summary
    by_label: Annotated[dict[str, Summary], Field(description="only where a scenario has several labels")]
    ratio_to_first: Annotated[
        dict[str, Spread], Field(description="figure / the first server's in the same round; empty for the first")
    ]
    goodput: Goodput | None = None
    rounds: list[RoundReport]


class Report(_Part):
    """The whole document."""

    kind: Literal["triptych.bench.serve"] = "triptych.bench.serve"
    version: Annotated[str, Field(description="of the client")]
    started_at: Annotated[str, Field(description="ISO 8601, UTC")]
    machine: Annotated[dict[str, str | int], Field(description="where the client ran")]
    settings: Annotated[dict[str, object], Field(description="everything that makes the run repeatable")]
    results: list[Result]


def figures_of(records: Sequence[Record], duration_s: float) -> Figures:
    """Returns the statistics of some of a round's records."""
    complete = [record for record in records if not record.error]
    errors: dict[str, int] = {}
    for record in records:
        if record.error:
            errors[record.error] = errors.get(record.error, 0) + 1
    tokens = sum(record.output_tokens for record in complete)
    prompts = [record.prompt_tokens for record in complete]
    return Figures(
        requests=len(records),
        errors=errors,
        duration_s=duration_s,
        requests_per_s=len(complete) / duration_s if duration_s else 0.0,
        output_tokens_per_s=tokens / duration_s if duration_s else 0.0,
        output_tokens=tokens,
        prompt_tokens=None if None in prompts else sum(count or 0 for count in prompts),
        counted=sum(record.counted for record in complete) / len(complete) if complete else 0.0,
        ttft_s=distribution([record.ttft_s for record in complete if record.ttft_s is not None]),
        tpot_s=distribution([record.tpot_s for record in complete if record.tpot_s is not None]),
        itl_s=distribution([gap for record in complete for gap in record.itl_s]),
        latency_s=distribution([record.latency_s for record in complete]),
    )


def report_round(outcome: Round, seed: int) -> RoundReport:
    """Returns one round's report."""
    labels = sorted({record.label for record in outcome.records})
    return RoundReport(
        seed=seed,
        figures=figures_of(outcome.records, outcome.duration_s),
        by_label={
            label: figures_of([record for record in outcome.records if record.label == label], outcome.duration_s)
            for label in labels
            if len(labels) > 1
        },
        client=Overhead(
            cpu_share=outcome.cpu_s / outcome.duration_s if outcome.duration_s else 0.0,
            loop_lag_s=distribution(outcome.loop_lags_s),
            send_lag_s=distribution([record.lag_s for record in outcome.records]),
        ),
        requests=[
            RequestRow(
                label=record.label,
                turn=record.turn,
                sent_s=record.sent_s,
                ttft_s=record.ttft_s,
                tpot_s=record.tpot_s,
                latency_s=record.latency_s,
                output_tokens=record.output_tokens,
                error=record.error,
            )
            for record in outcome.records
        ],
    )


def _quantile(kind: str, quantile: str) -> Callable[[Figures], float | None]:
    def read(figures: Figures) -> float | None:
        found: Distribution | None = getattr(figures, f"{kind}_s")
        return None if found is None else float(getattr(found, quantile))

    return read


_QUANTILES = (
    ("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99"), ("latency", "p50"),
    ("latency", "p99"),
)  # fmt: skip
_HEADLINES: dict[str, Callable[[Figures], float | None]] = {
    "output_tokens_per_s": lambda figures: figures.output_tokens_per_s,
    "requests_per_s": lambda figures: figures.requests_per_s,
    **{f"{kind}_{quantile}_s": _quantile(kind, quantile) for kind, quantile in _QUANTILES},
}


def summarise(rounds: Sequence[Figures]) -> Summary:
    """Returns the rounds' medians and spreads."""
    spreads = {
        name: spread([value for figures in rounds if (value := figure(figures)) is not None])
        for name, figure in _HEADLINES.items()
    }
    return Summary(errors=sum(sum(figures.errors.values()) for figures in rounds), **spreads)


def ratios(rounds: Sequence[Figures], first: Sequence[Figures]) -> dict[str, Spread]:
    """Returns each headline divided by the first server's of the same round, over the rounds."""
    found = {}
    for name, figure in _HEADLINES.items():
        pairs = [(figure(mine), figure(theirs)) for mine, theirs in zip(rounds, first, strict=True)]
        values = spread([mine / theirs for mine, theirs in pairs if mine is not None and theirs])
        if values is not None:
            found[name] = values
    return found
