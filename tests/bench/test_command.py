"""`triptych bench` as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.servers import OpenAiServer, serving
from triptych.bench.report import Report

pytestmark = pytest.mark.slow


async def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs `triptych bench` beside this event loop, which may be serving it."""
    import asyncio

    command = [sys.executable, "-m", "triptych.cli", "bench", *arguments]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=False)


SMALL = ("--requests", "4", "--repeats", "2", "--prompt-tokens", "4", "--output-tokens", "3", "--picture-side", "32")


async def test_two_servers_are_compared_in_a_table_a_file_and_one_line_of_json(tmp_path: Path) -> None:
    async with serving(OpenAiServer(owner="vllm")) as fast, serving(OpenAiServer(delay_s=0.02)) as slow:
        urls = ("--url", f"fast={fast.url}", "--url", f"slow={slow.url}")
        scenarios = ("--scenario", "text", "--scenario", "mixed")
        result = await bench("serve", *urls, *scenarios, *SMALL, "--concurrency", "2", "--json", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert {body["min_tokens"] for body in fast.bodies} == {3}
    assert "fast" in result.stderr and "TTFT p50" in result.stderr
    line = json.loads(result.stdout.splitlines()[-1])
    assert [(one["scenario"], one["server"]) for one in line["results"]] == [
        ("text", "fast"), ("text", "slow"), ("mixed", "fast"), ("mixed", "slow"),
    ]  # fmt: skip
    assert "requests" not in line["results"][0]["rounds"][0]
    assert line["results"][1]["ratio_to_first"]["ttft_p50_s"]["median"] > 1
    report = Report.model_validate_json((tmp_path / "report.json").read_text())
    assert len(report.results[0].rounds[0].requests) == 4


async def test_goodput_and_plots_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    limits = ("--slo-ttft-ms", "500", "--slo-tpot-ms", "100", "--start-rate", "40", "--max-rate", "80")
    async with serving(OpenAiServer()) as server:
        url = ("--url", server.url, "--probe-s", "0.2")
        result = await bench("serve", *url, *SMALL, *limits, "--rate", "50", "--out", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "goodput" in result.stdout
    for name in ("text-latency.png", "text-rate.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


async def test_failed_requests_make_the_exit_code_1() -> None:
    async with serving(OpenAiServer(status=503)) as server:
        result = await bench("serve", "--url", server.url, *SMALL, "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["results"][0]["summary"]["errors"] == 8


async def test_a_server_that_does_not_answer_is_named() -> None:
    result = await bench("serve", "--url", "http://127.0.0.1:1/v1")
    assert result.returncode == 1
    assert "127.0.0.1:1" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--scenario", "poetry"), "poetry"),
        (("--rate", "1", "--concurrency", "1"), "either"),
        (("--slo-ttft-ms", "1"), "both"),
        (("--url", "http://a/v1", "--url", "http://a/v1"), "different names"),
        (("--extra-body", "[]"), "JSON object"),
        (("--start-rate", "2", "--max-rate", "1"), "max-rate"),
    ],
)
async def test_arguments_that_do_not_fit_are_usage_errors(arguments: tuple[str, ...], complaint: str) -> None:
    result = await bench("serve", *arguments)
    assert result.returncode == 2
    assert complaint in " ".join(result.stderr.split())


async def test_the_schema_is_printed_as_json() -> None:
    result = await bench("schema")
    assert json.loads(result.stdout)["title"] == "Report"
