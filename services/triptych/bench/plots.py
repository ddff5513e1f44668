"""The report as pictures. Needs matplotlib, which the extra `bench` brings."""

from pathlib import Path
from typing import Any

from triptych.bench.report import Report, Result
from triptych.errors import Unavailable


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Writes, per scenario, the distributions of TTFT and latency, and throughput and p99 over rate where rates were
    searched; returns the files.

    Raises Unavailable when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unavailable("no plots without matplotlib: pip install 'triptych[bench]'") from None
    written = []
    for scenario in dict.fromkeys(result.scenario for result in report.results):
        results = [result for result in report.results if result.scenario == scenario]
        figure = Figure(figsize=(10, 4), layout="constrained")
        for axes, name, title in zip(
            figure.subplots(1, 2), ("ttft_s", "latency_s"), ("time to first token", "latency"), strict=True
        ):
            _distributions(axes, results, name)
            axes.set_title(f"{scenario}: {title}")
        written.append(_save(figure, folder / f"{scenario}-latency.png"))
        if any(result.goodput for result in results):
            figure = Figure(figsize=(10, 4), layout="constrained")
            _over_rate(figure.subplots(1, 2), results)
            written.append(_save(figure, folder / f"{scenario}-rate.png"))
    return written


def _distributions(axes: Any, results: list[Result], name: str) -> None:
    for result in results:
        values = sorted(
            value * 1000
            for one in result.rounds
            for request in one.requests
            if not request.error and (value := getattr(request, name)) is not None
        )
        if values:
            axes.step(values, [(index + 1) / len(values) for index in range(len(values))], where="post")
            axes.lines[-1].set_label(result.server)
    axes.set_xlabel("ms")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()


def _over_rate(axes: Any, results: list[Result]) -> None:
    throughput, latency = axes
    for result in results:
        if result.goodput is None:
            continue
        probes = sorted(result.goodput.probes, key=lambda probe: probe.rate)
        rates = [probe.rate for probe in probes]
        throughput.plot(rates, [probe.figures.output_tokens_per_s for probe in probes], "o-", label=result.server)
        timed = [probe for probe in probes if probe.figures.ttft_s]
        p99 = [probe.figures.ttft_s.p99 * 1000 for probe in timed if probe.figures.ttft_s]
        latency.plot([probe.rate for probe in timed], p99, "o-", label=result.server)
        latency.axhline(result.goodput.ttft_p99_limit_s * 1000, color="grey", linestyle="--")
    throughput.set_ylabel("output tokens/s")
    latency.set_ylabel("p99 TTFT, ms")
    latency.set_yscale("log")
    for one in axes:
        one.set_xlabel("requests/s offered")
        one.grid(alpha=0.3)
        one.legend()


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path
