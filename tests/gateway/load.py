"""Load on a real gateway process, from a router process that speaks at a fixed pace.

    python -m tests.gateway.load streams --streams 256 --tokens 60 --pace-s 0.1
    python -m tests.gateway.load soak --requests 20000

`streams` measures how much later a token arrives through the gateway than over gRPC alone, and counts lost events.
`soak` sends many short requests, half of them with a picture, and follows the gateway's memory. Both print JSON.
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import psutil

from tests.gateway.fakes import MODEL, FakeRouter, running_router
from triptych.http_health import answers_ok
from triptych.ports import free_ports
from triptych.rpc.channel import open_channel
from triptych.v1 import generation_pb2, inference_pb2
from triptych.v1.inference_pb2_grpc import InferenceServiceStub

RAMP_S = 2.0
"""Seconds over which streams start; what is said meanwhile is not measured."""

PICTURE = base64.b64encode(bytes(range(256)) * 200).decode()


class PacedRouter(FakeRouter):
    """Speaks `max_tokens` words, each its number and when it was said; `cache_salt` gives the pace, in seconds."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        yield inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id=request.request_id, model=MODEL))
        pace_s = float(request.cache_salt or 0)
        start_s = time.monotonic()
        for number in range(request.stopping.max_tokens):
            await asyncio.sleep(start_s + (number + 1) * pace_s - time.monotonic())
            text = f"{number} {time.monotonic()} "
            yield inference_pb2.GenerateResponse(chunk=generation_pb2.Chunk(text=text, token_count=1))
        finished = inference_pb2.Finished(finish_reason=generation_pb2.FINISH_REASON_LENGTH)
        finished.usage.output_tokens = request.stopping.max_tokens
        yield inference_pb2.GenerateResponse(finished=finished)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds from a token being said to its arrival."""

    p50_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, values: list[float]) -> "Latencies":
        """Returns the order statistics of a sample."""
        ordered = sorted(values)
        return cls(ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1])


@dataclass(frozen=True, slots=True)
class StreamsReport:
    """What `streams` found."""

    streams: int
    tokens: int
    lost_events: int
    direct: Latencies
    through_gateway: Latencies
    added_p50_s: float
    added_p99_s: float
    gateway_cpu_us_per_token: float


@dataclass(frozen=True, slots=True)
class SoakReport:
    """What `soak` found; memory in bytes, at every tenth of the requests."""

    requests: int
    failed: int
    requests_per_s: float
    rss: list[int]

    @property
    def growth(self) -> float:
        """Memory at the end as a multiple of that after the first fifth, when all pools are warm."""
        return self.rss[-1] / self.rss[len(self.rss) // 5]


@dataclass(frozen=True, slots=True)
class Pair:
    """A router and a gateway process."""

    router: str
    port: int
    gateway: psutil.Process


@contextlib.contextmanager
def processes() -> Iterator[Pair]:
    """Runs a paced router and a gateway in front of it."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "tests.gateway.load", "router"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as router:
        assert router.stdout is not None
        address = router.stdout.readline().strip()
        environment = {
            **os.environ,
            "TRIPTYCH_GATEWAY_PORT": str(port),
            "TRIPTYCH_GATEWAY_ROUTER": address,
            "TRIPTYCH_LOG_LEVEL": "WARNING",
        }
        with subprocess.Popen([sys.executable, "-m", "triptych.cli", "serve", "gateway"], env=environment) as gateway:
            try:
                yield Pair(address, port, psutil.Process(gateway.pid))
            finally:
                gateway.send_signal(signal.SIGTERM)
                gateway.wait(20)
                router.send_signal(signal.SIGTERM)


async def measure_streams(streams: int, tokens: int, pace_s: float) -> StreamsReport:
    """Runs the same load over gRPC alone and through a gateway."""
    with processes() as pair:
        await _ready(pair)
        async with open_channel(pair.router) as channel:
            stub = InferenceServiceStub(channel)
            direct = await _together(streams, tokens, lambda: _direct(stub, tokens, pace_s))
        cpu = pair.gateway.cpu_times()
        through = await _together(streams, tokens, lambda: _streamed(pair.port, tokens, pace_s))
        after = pair.gateway.cpu_times()
    spent_s = after.user + after.system - cpu.user - cpu.system
    plain, gated = Latencies.of(direct.delays), Latencies.of(through.delays)
    return StreamsReport(
        streams=streams,
        tokens=streams * tokens,
        lost_events=direct.lost + through.lost,
        direct=plain,
        through_gateway=gated,
        added_p50_s=gated.p50_s - plain.p50_s,
        added_p99_s=gated.p99_s - plain.p99_s,
        gateway_cpu_us_per_token=1e6 * spent_s / (streams * tokens),
    )


async def soak(requests: int, concurrency: int = 32) -> SoakReport:
    """Sends short requests, streamed or not, with and without a picture; follows the gateway's memory."""
    with processes() as pair:
        await _ready(pair)
        numbers = iter(range(requests))
        failed = 0
        rss: list[int] = []

        async def work() -> None:
            nonlocal failed
            for number in numbers:
                if number % (requests // 10) == 0:
                    rss.append(pair.gateway.memory_info().rss)
                failed += not await _short(pair.port, number)

        started_s = time.monotonic()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        seconds = time.monotonic() - started_s
        rss.append(pair.gateway.memory_info().rss)
    return SoakReport(requests, failed, requests / seconds, rss)


async def _ready(pair: Pair) -> None:
    async with asyncio.timeout(120):
        while not await answers_ok(f"http://127.0.0.1:{pair.port}/ready"):
            await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class _Load:
    """What a number of streams together heard, once all of them ran."""

    delays: list[float]
    lost: int


async def _together(streams: int, tokens: int, stream: Callable[[], Coroutine[Any, Any, "Heard"]]) -> _Load:
    """Starts streams one after the other over RAMP_S, so that they do not all speak in the same moment."""
    settled_s = time.monotonic() + RAMP_S

    async def later(delay_s: float) -> Heard:
        await asyncio.sleep(delay_s)
        return await stream()

    heard = await asyncio.gather(*(later(index * RAMP_S / streams) for index in range(streams)))
    delays = [delay for each in heard for said_s, delay in each.delays if said_s > settled_s]
    return _Load(delays, sum(each.lost(tokens) for each in heard))


async def _direct(stub: Any, tokens: int, pace_s: float) -> "Heard":
    request = inference_pb2.GenerateRequest(cache_salt=str(pace_s))
    request.stopping.max_tokens = tokens
    request.messages.add(role=inference_pb2.ROLE_USER).parts.add(text="go")
    heard = Heard()
    async for event in stub.Generate(request):
        if event.HasField("chunk"):
            heard.hear(event.chunk.text)
        heard.ended = event.HasField("finished")
    return heard


async def _streamed(port: int, tokens: int, pace_s: float) -> "Heard":
    body = _body("go", stream=True, max_tokens=tokens, triptych={"cache_salt": str(pace_s)})
    heard = Heard()
    reader, writer = await _post(port, body)
    async for line in reader:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                if choice["delta"].get("content"):
                    heard.hear(choice["delta"]["content"])
        heard.ended = heard.ended or line.startswith(b"data: [DONE]")
    writer.close()
    return heard


class Heard:
    """The words of one stream as they arrive.

    Attributes:
        delays: Per word, when it was said and how many seconds later it was heard.
        ended: Whether the stream said that it ended.
    """

    def __init__(self) -> None:
        self.delays: list[tuple[float, float]] = []
        self.ended = False
        self._misplaced = 0

    def hear(self, text: str) -> None:
        """Takes a word: its number and when it was said."""
        number, said_s = text.split()
        self._misplaced += int(number) != len(self.delays)
        self.delays.append((float(said_s), time.monotonic() - float(said_s)))

    def lost(self, tokens: int) -> int:
        """Returns how many events of a stream are missing or out of order."""
        return self._misplaced + abs(tokens - len(self.delays)) + (not self.ended)


async def _short(port: int, number: int) -> bool:
    content: Any = "go"
    if number % 2:
        content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}]
    reader, writer = await _post(port, _body(content, stream=number % 4 < 2, max_tokens=4))
    reply = await reader.read()
    writer.close()
    return reply.startswith(b"HTTP/1.1 200") and (b"[DONE]" in reply or b'"total_tokens"' in reply)


def _body(content: Any, **members: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], **members}).encode()


async def _post(port: int, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return reader, writer


async def _serve_router() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with running_router(PacedRouter()) as address:
        print(address, flush=True)
        await stop.wait()


def main() -> None:
    """Runs one measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["streams", "soak", "router"])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--pace-s", type=float, default=0.1)
    parser.add_argument("--requests", type=int, default=20_000)
    arguments = parser.parse_args()
    if arguments.what == "router":
        asyncio.run(_serve_router())
    elif arguments.what == "streams":
        report = asyncio.run(measure_streams(arguments.streams, arguments.tokens, arguments.pace_s))
        print(json.dumps(asdict(report), indent=2))
    else:
        soaked = asyncio.run(soak(arguments.requests))
        print(json.dumps({**asdict(soaked), "growth": soaked.growth}, indent=2))


if __name__ == "__main__":
    main()
