"""An encoder and a worker that exist only for time and failure; the real ones are tested in tests/stack."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc
import numpy as np
from opentelemetry.context import Context
from PIL import Image

from triptych import tensors
from triptych.errors import EncoderChanged, FeaturesRequired, TriptychError
from triptych.rpc.channel import bind, create_server
from triptych.v1 import generation_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from triptych.vision.encoder import Features
from triptych.vision.encoder_spec import EncoderSpec
from triptych.vision.preprocess import Pixels
from triptych.vision.scheduler import EncodeClass

SPEC = EncoderSpec(
    image_side=112,
    patch_size=14,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
    rescale_factor=1 / 255,
    resample="bicubic",
    hidden_size=8,
    select_strategy="default",
    fingerprint="f00d",
    version="1",
)


class FakeEncoder:
    """Counts calls; `behave` may sleep or raise before the features (the mean of the pixels, repeated) come."""

    def __init__(self) -> None:
        self.spec: EncoderSpec | None = SPEC
        self.ready = True
        self.calls = 0
        self.running = 0
        self.traces: list[Context | None] = []
        self.behave: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.direction = np.ones(SPEC.hidden_size, np.float32)

    async def refresh(self, timeout_s: float) -> bool:
        return self.ready

    def check_integrity(self) -> None:
        pass

    def expect(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def encode(
        self,
        pixels: Pixels,
        timeout_s: float,
        trace: Context | None = None,
        *,
        priority: EncodeClass = EncodeClass.STANDARD,
        version: str | None = None,
    ) -> Features:
        self.calls += 1
        if version is not None and (self.spec is None or version != self.spec.version):
            raise EncoderChanged(version)
        self.running += 1
        self.traces.append(trace)
        try:
            await self.behave()
        finally:
            self.running -= 1
        return np.tile(pixels.mean() * self.direction, (SPEC.token_count(pixels.shape[-1]), 1)).astype(np.float32)

    async def close(self) -> None:
        pass


class FakeWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers `words` to everything; `kv` are identities it claims to cover. Hooks wait or raise."""

    def __init__(self) -> None:
        self.words = ["a", "b", "c"]
        self.kv: set[bytes] = set()
        self.evicted: set[bytes] = set()
        self.requests: list[worker_pb2.WorkerGenerateRequest] = []
        self.features: list[list[Features | None]] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.running = 0
        self.before_first: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.between: Callable[[int], Any] = lambda index: asyncio.sleep(0)
        self.probe: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.silent = asyncio.Event()
        self.hidden_size = SPEC.hidden_size
        self.text_only = False
        self.refuse: TriptychError | None = None
        self.verdicts: list[worker_pb2.SettleDraftRequest] = []
        self.settled: dict[str, asyncio.Event] = {}
        self.before_settled: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.visual_kv = generation_pb2.VisualKvReport(policy=generation_pb2.VISUAL_KV_POLICY_EXACT)
        self.probes: list[worker_pb2.ProbeCacheRequest] = []

    async def InspectCache(
        self, request: worker_pb2.InspectCacheRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.CacheReport:
        return worker_pb2.CacheReport()

    async def DropCached(
        self, request: worker_pb2.DropCachedRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.DropCachedResponse:
        return worker_pb2.DropCachedResponse()

    async def PinImage(
        self, request: worker_pb2.PinImageRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.PinImageResponse:
        return worker_pb2.PinImageResponse()

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.running += 1
        try:
            images = request.prompt.images
            self.features.append(
                [tensors.from_proto(image.features) if image.HasField("features") else None for image in images]
            )
            if any(not image.HasField("features") and image.identity in self.evicted for image in images):
                raise FeaturesRequired("evicted")
            if self.refuse is not None:
                raise self.refuse
            yield worker_pb2.WorkerGenerateResponse(started=worker_pb2.WorkerStarted(prompt_tokens=9))
            if request.HasField("draft") and not request.draft.early_text:
                await self.settled.setdefault(request.draft.id, asyncio.Event()).wait()
            await self.before_first()
            for index, word in enumerate(self.words):
                await self.between(index)
                yield worker_pb2.WorkerGenerateResponse(chunk=generation_pb2.Chunk(text=word, token_count=1))
            if request.draft.early_text:
                await self.settled.setdefault(request.draft.id, asyncio.Event()).wait()
                if not self.verdicts[-1].keep:
                    yield worker_pb2.WorkerGenerateResponse(retracted=generation_pb2.Retracted())
                    yield worker_pb2.WorkerGenerateResponse(chunk=generation_pb2.Chunk(text="right", token_count=1))
            finished = worker_pb2.WorkerFinished(finish_reason=generation_pb2.FINISH_REASON_END)
            finished.usage.text_tokens = 5
            finished.usage.visual_tokens = sum(image.token_count for image in images)
            finished.usage.output_tokens = len(self.words)
            finished.durations.queue.FromMilliseconds(1)
            finished.durations.prefill.FromMilliseconds(2)
            finished.durations.decode.FromMilliseconds(3)
            finished.visual_kv.CopyFrom(self.visual_kv)
            yield worker_pb2.WorkerGenerateResponse(finished=finished)
        finally:
            self.running -= 1

    async def SettleDraft(
        self, request: worker_pb2.SettleDraftRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.SettleDraftResponse:
        await self.before_settled()
        self.verdicts.append(request)
        self.settled.setdefault(request.id, asyncio.Event()).set()
        return worker_pb2.SettleDraftResponse(drafted_tokens=2)

    async def ProbeCache(
        self, request: worker_pb2.ProbeCacheRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> worker_pb2.ProbeCacheResponse:
        self.probes.append(request)
        await self.probe()
        covered = [image.identity in self.kv for image in request.prompt.images]
        return worker_pb2.ProbeCacheResponse(prompt_tokens=9, images_covered=covered)

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[worker_pb2.WorkerLoad]:
        while True:
            if not self.silent.is_set():
                model = worker_pb2.WorkerModel(
                    name="demo",
                    fingerprint="cafe",
                    context_tokens=512,
                    hidden_size=self.hidden_size,
                    text_only=self.text_only,
                )
                yield worker_pb2.WorkerLoad(model=model)
            await asyncio.sleep(0.05)


async def start_worker(worker: FakeWorker, port: int = 0) -> tuple[grpc.aio.Server, int]:
    """Serves a fake worker on loopback; returns the server and its port."""
    server, _ = create_server([])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    bound = bind(server, "127.0.0.1", port)
    await server.start()
    return server, bound


def png(colour: tuple[int, int, int] = (200, 30, 40), size: tuple[int, int] = (40, 30)) -> bytes:
    """Returns a small encoded picture."""
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def ask(*content: bytes | str, **fields: Any) -> inference_pb2.GenerateRequest:
    """Returns a request of one user message: bytes are images, strings are text."""
    parts = [
        inference_pb2.Part(text=item)
        if isinstance(item, str)
        else inference_pb2.Part(image=inference_pb2.Image(data=item))
        for item in content
    ]
    message = inference_pb2.Message(role=inference_pb2.ROLE_USER, parts=parts)
    return inference_pb2.GenerateRequest(messages=[message], **fields)
