import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from triptych.bench.vision.figures import Batch, Figures, Outcome
from triptych.bench.vision.memory import MemorySampler, resident_bytes
from triptych.bench.vision.report import write_plot


def outcome(rule: str, peaks: list[int], seconds: float) -> Outcome:
    batches = [Batch(2, 100, index, index + 1.0, peak) for index, peak in enumerate(peaks)]
    return Outcome(rule, batches, [0.1 * number for number in range(2 * len(peaks))], seconds)


def figures() -> Figures:
    return Figures(100, 50.0, 1.0, outcome("pixels", [100, 150], 2.0), outcome("count", [100, 600], 2.2), 2)


def test_ratios_are_to_the_budgets_prediction_and_to_the_count_rules_throughput() -> None:
    assert figures().predicted_bytes == 150
    assert figures().keys() == {
        "peak_memory_ratio_pixels": 1.0,
        "peak_memory_ratio_count": 4.0,
        "throughput_ratio": pytest.approx(1.1),
    }
    assert figures().pixels.mean_batch == 2
    assert figures().count.variation > figures().pixels.variation


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    write_plot(figures(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_sampler_sees_the_peak_of_a_span() -> None:
    child = "a = bytearray(64 << 20); print(flush=True); input(); del a; print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdout.readline()
        sampler = MemorySampler([process.pid])
        start_s = time.monotonic()  # In front of the first sample, which may come at once.
        with sampler.running():
            while not sampler.samples:
                time.sleep(0.01)
            process.stdin.write("\n")
            process.stdout.readline()
        peak = sampler.peak(start_s, time.monotonic())
        assert peak - resident_bytes([process.pid]) > 48 << 20
    finally:
        process.kill()
        process.communicate()


@pytest.mark.integration
@pytest.mark.slow
def test_the_command_measures_a_real_triton_and_its_last_line_has_the_keys(tmp_path: Path) -> None:
    command = ["bench", "vision", "--images", "20", "--outstanding", "10", "--json"]
    run = subprocess.run([sys.executable, "-m", "triptych.cli", *command], capture_output=True, text=True, check=True)
    keys = json.loads(run.stdout.splitlines()[-1])
    assert keys["peak_memory_ratio_pixels"] < 1.4
    assert keys["peak_memory_ratio_count"] > 0
    assert keys["throughput_ratio"] > 0.5
