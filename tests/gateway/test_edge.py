"""What holds for every request: ids, traces, health, metrics, limits, and nothing left behind."""

import asyncio
import json
import subprocess
import sys
import time

import pytest

from tests.gateway.conftest import Rig, running_rig
from tests.gateway.fakes import FakeRouter, running_router
from triptych.config import GatewaySettings
from triptych.gateway.server import run_gateway
from triptych.http_health import answers_ok
from triptych.v1 import inference_pb2


async def test_a_request_id_is_echoed_or_made(rig: Rig) -> None:
    named = await rig.chat(headers={"X-Request-Id": "mine.1"})
    assert named.headers["x-request-id"] == named.json()["triptych"]["request_id"] == "mine.1"
    assert named.json()["id"] == "chatcmpl-mine.1"
    made = await rig.chat(headers={"X-Request-Id": "no good!"})
    assert len(made.headers["x-request-id"]) == 32
    refused = await rig.chat(foo=1, headers={"X-Request-Id": "mine.2"})
    assert refused.headers["x-request-id"] == "mine.2"


async def test_health_is_the_process_and_ready_is_the_router() -> None:
    async with (
        running_router(FakeRouter(), serving=False) as address,
        run_gateway(GatewaySettings(router=address), port=0) as port,
    ):
        assert await answers_ok(f"http://127.0.0.1:{port}/health")
        assert not await answers_ok(f"http://127.0.0.1:{port}/ready")
    async with running_rig({}) as rig:
        assert (await rig.http.get("/ready")).json() == {"status": "ok"}
    assert not await answers_ok("http://127.0.0.1:1/ready")


async def test_a_stream_is_events_that_no_proxy_keeps(rig: Rig) -> None:
    response = await rig.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "one two three"
    assert "usage" not in chunks[0] and "triptych" in chunks[0] and "timings" in chunks[-1]["triptych"]


async def test_words_arrive_when_they_are_spoken_not_at_the_end(rig: Rig) -> None:
    spoken = asyncio.Event()

    async def before_word(index: int) -> None:
        if index == 1:
            await spoken.wait()

    rig.router.before_word = before_word
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    async with asyncio.timeout(5), rig.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if "one " in line:
                spoken.set()  # Only because it was seen, the router goes on.
    assert spoken.is_set()


async def test_leaving_a_stream_cancels_at_the_router(rig: Rig) -> None:
    rig.router.words = lambda request: ["word"] * 1000
    rig.router.before_word = lambda index: asyncio.sleep(0.01)
    body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "stream": True, "n": 3}
    async with rig.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if "word" in line:
                break
    left_s = time.monotonic()
    while rig.router.running:
        assert time.monotonic() - left_s < 10
        await asyncio.sleep(0.01)
    assert rig.router.cancelled == 3


async def test_one_failing_choice_ends_the_others(rig: Rig) -> None:
    rig.router.before_word = lambda index: asyncio.sleep(0.01)

    def words(request: inference_pb2.GenerateRequest) -> list[str]:
        if request.request_id.endswith(":1"):
            raise ValueError
        return ["word"] * 1000

    rig.router.words = words
    response = await rig.chat(n=3)
    assert response.status_code == 500
    async with asyncio.timeout(2):
        while rig.router.running:
            await asyncio.sleep(0.01)


async def test_metrics_count_requests_tokens_and_times_without_any_text(rig: Rig) -> None:
    await rig.chat(messages=[{"role": "user", "content": "sesame"}])
    await rig.chat(stream=True)
    await rig.chat(foo="sesame")
    text = (await rig.http.get("/metrics")).text
    for line in (
        'mm_http_requests_total{route="/v1/chat/completions",status="200"} 2.0',
        'mm_http_requests_total{route="/v1/chat/completions",status="400"} 1.0',
        "mm_ttft_seconds_count 2.0",
        "mm_prefill_seconds_count 2.0",
        "mm_output_tokens_total 6.0",
        'mm_prompt_tokens_total{kind="text"} 10.0',
        "mm_cached_tokens_total 4.0",
        "mm_http_requests_in_flight 0.0",
    ):
        assert line in text, line
    assert "sesame" not in text


async def test_unknown_urls_have_one_label(rig: Rig) -> None:
    for number in range(5):
        await rig.http.get(f"/v1/nothing/{number}")
    text = (await rig.http.get("/metrics")).text
    assert 'mm_http_requests_total{route="unmatched",status="404"} 5.0' in text


async def test_a_callers_trace_goes_on_to_the_router(rig: Rig) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    await rig.chat(headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
    assert trace_id in str(rig.router.metadata[-1]["traceparent"])


@pytest.mark.parametrize("knobs", [{"max_inflight": 512}], ids=["room"])
async def test_health_and_metrics_answer_while_many_streams_run(rig: Rig) -> None:
    rig.router.words = lambda request: ["word "] * 40
    rig.router.before_word = lambda index: asyncio.sleep(0.05)
    streams = [asyncio.create_task(rig.chat(stream=True)) for _ in range(64)]
    while rig.router.running < 64:
        await asyncio.sleep(0.01)
    waits = []
    for _ in range(20):
        for path in ("/health", "/metrics"):
            asked_s = time.monotonic()
            assert (await rig.http.get(path)).status_code == 200
            waits.append(time.monotonic() - asked_s)
    await asyncio.gather(*streams)
    # The limit is 0.1 s at p99 on a quiet machine, where router and client do not share the gateway's process.
    assert sorted(waits)[len(waits) // 2] < 0.5


def test_the_gateway_loads_nothing_that_its_image_lacks() -> None:
    code = """if True:
        import sys, triptych.gateway.server
        print({"torch", "numpy", "PIL", "tritonclient", "transformers"} & set(sys.modules))
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


async def test_a_port_that_is_taken_is_named(rig: Rig) -> None:
    port = int(rig.url.rpartition(":")[2])
    with pytest.raises(OSError, match=str(port)):
        async with run_gateway(GatewaySettings(), port=port):
            pass
