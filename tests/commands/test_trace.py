"""`triptych trace`: a request's waterfall, without Jaeger."""

import json
import os
from pathlib import Path

import pytest

from tests.commands.conftest import Stack, triptych
from tests.stack.conftest import noise_png
from triptych.commands.trace import find, is_complete
from triptych.errors import InvalidRequest
from triptych.telemetry.span_log import SpanLog, default_path
from triptych.telemetry.span_store import Span


def span(name: str, service: str, span_id: str, parent: str = "", **attributes: str) -> Span:
    return Span(name, service, "aa", span_id, parent, 1, 2, attributes)


ROUTER = span("router.generate", "router", "1")
WORKER = span("worker.generate", "worker", "2", "1")


def ask(stack: Stack, picture: Path, question: str) -> dict[str, str]:
    result = stack.triptych("ask", str(picture), question, "--address", stack.up.router, "--max-tokens", "4", "--json")
    assert result.returncode == 0, result.stderr
    answer: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return answer


@pytest.mark.integration
def test_a_request_is_drawn_by_its_id_by_its_trace_and_as_the_newest(stack: Stack, tmp_path: Path) -> None:
    picture = tmp_path / "noise.png"
    picture.write_bytes(noise_png(31337, 64))
    secret = "xylophone"
    answer = ask(stack, picture, f"is there a {secret}?")
    by_id = stack.triptych("trace", answer["request_id"], "--json")
    assert by_id.returncode == 0, by_id.stderr
    trace = json.loads(by_id.stdout.splitlines()[-1])
    assert trace["trace_id"] == answer["trace_id"] and trace["request_id"] == answer["request_id"]
    assert {row["service"] for row in trace["spans"]} == {"router", "worker", "triton"}
    assert trace["spans"][0]["name"] == "router.generate" and trace["spans"][0]["depth"] == 0
    drawn = [stack.triptych("trace", *name).stdout for name in ((answer["trace_id"],), ())]
    assert all("worker.decode" in text and "█" in text for text in drawn)
    files = b"".join(path.read_bytes() for path in (stack.cache / "triptych").iterdir())
    assert secret.encode() not in files and b"worker.decode" in files


@pytest.mark.integration
def test_a_completion_over_http_is_found_by_its_id(stack: Stack) -> None:
    import urllib.request

    body = {"model": "any", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    with urllib.request.urlopen(f"{stack.up.http}/v1/models", timeout=30) as response:
        body["model"] = json.load(response)["data"][0]["id"]
    request = urllib.request.Request(
        f"{stack.up.http}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        completion = json.load(response)["id"]
    result = stack.triptych("trace", completion)
    assert result.returncode == 0, result.stderr
    assert "gateway.request" in result.stdout and "worker.generate" in result.stdout


def test_an_unknown_request_says_who_keeps_spans(tmp_path: Path) -> None:
    result = triptych("trace", "nobody", environment={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert result.returncode == 1
    assert "TRACE_UNKNOWN" in result.stderr and "--no-traces" in result.stderr


def test_a_trace_is_complete_once_root_worker_and_triton_are_there() -> None:
    encode = span("router.encode", "router", "3", "1")
    assert is_complete([ROUTER, WORKER])
    assert not is_complete([])
    assert not is_complete([ROUTER])
    assert not is_complete([WORKER])
    assert not is_complete([ROUTER, WORKER, encode])
    assert is_complete([ROUTER, WORKER, encode, span("vision", "triton", "4", "3")])


def test_what_is_still_under_way_is_waited_for_and_then_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with SpanLog(default_path()) as log:
        log.add([span("router.generate", "router", "1", **{"triptych.request_id": "r"})])
        assert [found.name for found in find(log, "chatcmpl-r", wait_s=0.1)] == ["router.generate"]
        with pytest.raises(InvalidRequest, match="no request 'x'"):
            find(log, "x", wait_s=0.1)
