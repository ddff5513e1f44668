"""A router that exists only for time and failure; the real one is behind tests/gateway/test_clients.py."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from triptych.errors import TriptychError, Unavailable
from triptych.router.server import SERVICE
from triptych.rpc.channel import bind, create_server, set_serving
from triptych.v1 import generation_pb2, inference_pb2, inference_pb2_grpc

MODEL = "fake"


class FakeRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Says `words` to everything. Hooks wait or raise."""

    def __init__(self) -> None:
        self.words: Callable[[inference_pb2.GenerateRequest], list[str]] = lambda request: ["one ", "two ", "three"]
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.running = 0
        self.cancelled = 0
        self.refuse: TriptychError | None = None
        self.no_model: TriptychError | None = None
        self.before_started: Callable[[], Any] = lambda: asyncio.sleep(0)
        self.before_word: Callable[[int], Any] = lambda index: asyncio.sleep(0)
        self.degradations: list[inference_pb2.Degradation] = []

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.running += 1
        try:
            if self.refuse is not None:
                raise self.refuse
            await self.before_started()
            images = [part.image for message in request.messages for part in message.parts if part.HasField("image")]
            started = inference_pb2.Started(request_id=request.request_id, model=MODEL, trace_id="ab" * 16)
            for _ in images:
                started.images.add(
                    width=8, height=6, encoded_side=112, visual_tokens=64, source=inference_pb2.FEATURE_SOURCE_ENCODER
                )
            yield inference_pb2.GenerateResponse(started=started)
            words = self.words(request)
            for index, word in enumerate(words):
                await self.before_word(index)
                chunk = generation_pb2.Chunk(text=word, token_count=1)
                if request.sampling.HasField("top_logprobs"):
                    choice = chunk.tokens.add(chosen=generation_pb2.TokenLogprob(text=word, logprob=-0.5))
                    for rank in range(request.sampling.top_logprobs):
                        choice.top.add(text=f"{word}{rank}", logprob=-0.5 - rank)
                yield inference_pb2.GenerateResponse(chunk=chunk)
            finished = inference_pb2.Finished(finish_reason=generation_pb2.FINISH_REASON_END)
            finished.usage.text_tokens = 5
            finished.usage.visual_tokens = 64 * len(images)
            finished.usage.cached_tokens = 2
            finished.usage.output_tokens = len(words)
            for name in ("intake", "queue", "prefill", "decode", "time_to_first_token", "total"):
                getattr(finished.durations, name).FromMilliseconds(1)
            finished.degradations.extend(self.degradations)
            lossy = request.visual_kv == generation_pb2.VISUAL_KV_POLICY_COMPRESS_VISUAL_MERGE
            finished.visual_kv.policy = request.visual_kv or generation_pb2.VISUAL_KV_POLICY_EXACT
            finished.visual_kv.lossy, finished.visual_kv.saved_bytes = lossy, 99 * lossy
            yield inference_pb2.GenerateResponse(finished=finished)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> inference_pb2.Model:
        if self.no_model is not None:
            raise self.no_model
        return inference_pb2.Model(
            name=MODEL,
            fingerprint="f00d",
            context_tokens=2048,
            native_image_side=112,
            native_visual_tokens=64,
            max_images=8,
            encoder_version="1",
        )


@asynccontextmanager
async def running_router(fake: FakeRouter, serving: bool = True) -> AsyncIterator[str]:
    """Serves a fake router on loopback and yields its address."""
    server, health = create_server([SERVICE])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    port = bind(server, "127.0.0.1", 0)
    await set_serving(health, [SERVICE], serving)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def lost() -> Unavailable:
    """Returns what a lost worker looks like."""
    return Unavailable("the worker does not answer", reason="WORKER_UNAVAILABLE")
