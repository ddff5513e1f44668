"""Time to first token of questions about pictures seen before, by the tier that has their KV, through the whole stack.

The device's pool holds one dialogue and a half, so that a few pictures later the KV of a picture is in host memory
only; after the worker was restarted it is on disk only. The same prompts are asked in every place, last of all with
nothing cached, and every answer must be the same.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triptych import client
from triptych.bench.content import make_picture, make_prompt
from triptych.bench.statistics import Spread, spread_of
from triptych.config import RouterSettings, TritonSettings, WorkerSettings
from triptych.errors import IntegrityError, Unavailable
from triptych.processes import ServiceSpec
from triptych.rpc.channel import open_channel
from triptych.rpc.health import is_serving
from triptych.stack import Stack, StackSettings, plan_stack
from triptych.v1 import worker_pb2, worker_pb2_grpc

PLACES = ("cold", "device", "host", "disk")
KINDS = ("second_turn", "first_question")

_PICTURE_SIDE = 512
_ANSWER_TOKENS = 8
_TIMEOUT_S = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Visit:
    """A picture with what is asked about it: a first question, and the prompt that is measured.

    Attributes:
        kind: `second_turn`: the dialogue goes on; `first_question`: somebody else asks something.
        picture: The picture's file.
        opening: The first question.
        measured: What is asked later, in every place.
    """

    kind: str
    picture: bytes
    opening: str
    measured: str


@dataclass(frozen=True, slots=True)
class TierTimes:
    """Seconds to the first token, as the client sees them.

    Attributes:
        seconds: By place and kind.
        cached_tokens: By place, the fewest prompt tokens that came from the cache.
        prompt_tokens: Tokens of a measured prompt, of the longest.
    """

    seconds: dict[str, dict[str, Spread]]
    cached_tokens: dict[str, int]
    prompt_tokens: int

    def ratio(self, place: str) -> float:
        """Returns how much sooner than cold the first token comes: the smaller one of the two kinds."""
        return min(self.seconds["cold"][kind].median / self.seconds[place][kind].median for kind in KINDS)


async def measure_tiers(model_dir: Path, repository: Path, pictures: int, say: Say = lambda text: None) -> TierTimes:
    """Measures with `pictures` pictures of each kind. Raises Unavailable, and IntegrityError for a different answer."""
    dice = np.random.default_rng(0)
    visits = [
        Visit(kind, make_picture(dice, _PICTURE_SIDE, "PNG"), make_prompt(dice, 12), make_prompt(dice, 12))
        for _ in range(pictures)
        for kind in KINDS
    ]
    with tempfile.TemporaryDirectory() as scratch:
        settings = _settings(model_dir, repository, Path(scratch))
        specs = {spec.name: spec for spec in plan_stack(settings)}
        bench = _Bench(settings, visits, say)
        say("starting Triton, router and worker")
        async with _running(specs["triton"], specs["router"]) as front:
            async with _running(specs["worker"]) as worker:
                await asyncio.gather(front.start(), worker.start())
                await bench.begin()
                await bench.ask_all("device", fresh=True)
                await bench.ask_all("host")
            _forget_file_cache(Path(scratch))
            async with _running(specs["worker"]) as worker:
                await worker.start()
                await bench.begin()
                await bench.ask_all("disk")
                await bench.ask_all("cold", drop=True)
    return bench.times()


class _Bench:
    """The client's side."""

    def __init__(self, settings: StackSettings, visits: list[Visit], say: Say) -> None:
        self._settings, self._visits, self._say = settings, visits, say
        self._openings: dict[int, str] = {}
        self._answers: dict[int, str] = {}
        self._seconds: dict[str, dict[str, list[float]]] = {place: {kind: [] for kind in KINDS} for place in PLACES}
        self._cached: dict[str, list[int]] = {place: [] for place in PLACES}
        self._prompt_tokens = 0

    async def begin(self) -> None:
        """Waits for the router to see the worker, and lets everything run once."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not await is_serving(self._settings.router_address):
            if time.monotonic() > deadline_s:
                raise Unavailable("the stack does not get ready")
            await asyncio.sleep(0.1)
        warm = make_picture(np.random.default_rng(int(time.time())), _PICTURE_SIDE, "PNG")
        async with client.AsyncClient(self._settings.router_address) as service:
            for question in ("hello", "what is it"):
                await service.ask(warm, question, options=_options())

    async def ask_all(self, place: str, *, fresh: bool = False, drop: bool = False) -> None:
        """Asks every measured prompt; `fresh`: right after its first question; `drop`: with nothing cached."""
        async with client.AsyncClient(self._settings.router_address) as service:
            for number, visit in enumerate(self._visits):
                self._say(f"{place}: picture {number + 1} of {len(self._visits)}")
                if fresh:
                    self._openings[number] = (await service.ask(visit.picture, visit.opening, options=_options())).text
                if drop:
                    await self._worker("DropCached", worker_pb2.DropCachedRequest(everything=True))
                await self._ask(service, place, number, visit)

    def times(self) -> TierTimes:
        """Returns what was measured."""
        seconds = {
            place: {kind: spread_of(values) for kind, values in kinds.items()} for place, kinds in self._seconds.items()
        }
        return TierTimes(seconds, {place: min(cached) for place, cached in self._cached.items()}, self._prompt_tokens)

    async def _ask(self, service: client.AsyncClient, place: str, number: int, visit: Visit) -> None:
        messages = [client.user(visit.picture, visit.measured)]
        if visit.kind == "second_turn":
            opening = client.user(visit.picture, visit.opening)
            messages = [opening, client.assistant(self._openings[number]), client.user(visit.measured)]
        text, first_s, usage = "", None, None
        started_s = time.perf_counter()
        async for event in service.stream(messages, _options()):
            kind = event.WhichOneof("event")
            if kind == "chunk":
                first_s = first_s or time.perf_counter() - started_s
                text += event.chunk.text
            elif kind == "finished":
                usage = event.finished.usage
        if first_s is None or usage is None:
            raise Unavailable("an answer had no text")
        if text != self._answers.setdefault(number, text):
            raise IntegrityError(f"the answer with KV from {place} differs: {text!r}, not {self._answers[number]!r}")
        self._seconds[place][visit.kind].append(first_s)
        self._cached[place].append(usage.cached_tokens)
        self._prompt_tokens = max(self._prompt_tokens, usage.text_tokens + usage.visual_tokens)

    async def _worker(self, method: str, request: object) -> None:
        async with open_channel(self._settings.router.worker) as channel:
            await getattr(worker_pb2_grpc.WorkerServiceStub(channel), method)(request, timeout=_TIMEOUT_S)


def _options() -> client.Options:
    return client.Options(max_tokens=_ANSWER_TOKENS, ignore_eos=True, degrade=False, timeout_s=_TIMEOUT_S)


def _settings(model_dir: Path, repository: Path, scratch: Path) -> StackSettings:
    worker = WorkerSettings.model_validate(
        {
            "model_dir": model_dir,
            "dtype": "bfloat16",
            "kv_blocks": 64,
            "kv_host_bytes": 1 << 30,
            "kv_disk_dir": scratch,
            "kv_prefetch_timeout_s": 5.0,
        }
    )
    router = RouterSettings.model_validate(
        {
            "encoder_cache_bytes": 0,  # Only KV is measured here.
            "medium_headroom": 0.0,  # The pool is small on purpose.
            "low_headroom": 0.0,
            "encode_timeout_s": _TIMEOUT_S,
            "prefill_timeout_s": _TIMEOUT_S,
            "next_token_timeout_s": _TIMEOUT_S,
        }
    )
    triton = TritonSettings.model_validate({"model_repository": repository, "start_timeout_s": 300.0})
    return StackSettings(triton, worker, router).on_free_ports()


@asynccontextmanager
async def _running(*specs: ServiceSpec) -> AsyncIterator[Stack]:
    """Yields services to be started, and stops them at the end."""
    logs: list[str] = []
    stack = Stack(specs, lambda name, line: logs.append(line))
    try:
        yield stack
    finally:
        await asyncio.shield(stack.stop())


def _forget_file_cache(folder: Path) -> None:
    """Makes the kernel forget what it has of the files, so that they are read from the disk."""
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
