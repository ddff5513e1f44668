"""WorkerService: thin translation between gRPC and the engine's thread."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry import trace

from triptych.config import WorkerSettings
from triptych.errors import TriptychError
from triptych.telemetry.tracing import extract, tracer
from triptych.v1 import generation_pb2, worker_pb2, worker_pb2_grpc
from triptych.visual_kv import VisualKvPolicy
from triptych.worker import inspection
from triptych.worker.drafts import DraftedGeneration, Drafts
from triptych.worker.engine.events import Completed, Event, Load, Queued, Retracted, Text
from triptych.worker.engine.logprobs import TokenChoice
from triptych.worker.engine.request import FinishReason
from triptych.worker.engine.thread import EngineThread
from triptych.worker.intake import read_final, read_policy, read_prompt, read_request
from triptych.worker.loading import LoadedModel
from triptych.worker.spans import record_draft, record_stages, stage_durations

_FINISH_REASONS = {
    FinishReason.END: generation_pb2.FINISH_REASON_END,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_LOAD_INTERVAL_S = 0.1  # At most this often.
_LOAD_SIGN_OF_LIFE_S = 1.0  # At least this often.

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Translates between gRPC and the engine's thread.

    Attributes:
        drafts: The generations that wait for a verdict on their features.
    """

    def __init__(self, model: LoadedModel, engine: EngineThread, settings: WorkerSettings) -> None:
        self._model = model
        self._engine = engine
        self._settings = settings
        self._stopping = False
        self.drafts = Drafts(engine, settings.draft_timeout_s)
        hierarchy = model.engine.reuse.hierarchy
        self._shared = None if hierarchy is None else hierarchy.shared
        self._tokenizing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._description = worker_pb2.WorkerModel(
            name=model.name,
            fingerprint=model.fingerprint,
            context_tokens=model.engine.context_tokens,
            hidden_size=model.config.decoder.hidden_size,
            text_only=model.config.image_token_id is None,
        )

    async def Generate(
        self, request: worker_pb2.WorkerGenerateRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerGenerateResponse]:
        """Streams one answer; see worker.proto."""
        arrival_ns = time.time_ns()
        attributes = {"triptych.request_id": request.request_id, "gen_ai.request.model": self._model.name}
        parent = extract(context.invocation_metadata())
        span = tracer.start_span("worker.generate", parent, attributes=attributes, start_time=arrival_ns)
        drafted: DraftedGeneration | None = None
        try:
            prepared = await asyncio.get_running_loop().run_in_executor(
                self._tokenizing, read_request, request, self._model, self._settings, arrival_ns
            )
            if request.HasField("draft"):
                drafted = self.drafts.begin(request.draft.id, prepared, request.draft.early_text)
            generation = drafted or self._engine.submit(prepared)
            # The end of the call, however it comes about, ends the generation.
            context.add_done_callback(lambda _: generation.cancel())  # type: ignore[arg-type]  # A slip in the stubs.
            async for event in generation.events():
                if isinstance(event, Completed):
                    record_stages(span, event.timeline, event.usage)
                    if drafted is not None:
                        record_draft(span, drafted)
                yield _to_response(event)
        except TriptychError as error:
            span.set_status(trace.StatusCode.ERROR, error.reason)
            raise
        finally:
            if drafted is not None:
                self.drafts.end(drafted)
            span.end()

    async def SettleDraft(
        self, request: worker_pb2.SettleDraftRequest, context: Context
    ) -> worker_pb2.SettleDraftResponse:
        """Keeps a draft or replaces its features; see worker.proto."""
        drafted = self.drafts.find(request.id)
        final = None
        if not request.keep:
            final = await asyncio.get_running_loop().run_in_executor(
                self._tokenizing, read_final, drafted.request, request, self._model
            )
        self.drafts.settle(request.id, final)
        return worker_pb2.SettleDraftResponse(drafted_tokens=drafted.drafted_tokens)

    async def ProbeCache(
        self, request: worker_pb2.ProbeCacheRequest, context: Context
    ) -> worker_pb2.ProbeCacheResponse:
        """Tells what the KV cache covers; see worker.proto."""
        prompt = await asyncio.get_running_loop().run_in_executor(
            self._tokenizing, read_prompt, request.prompt, self._model
        )
        policy = read_policy(request.visual_kv, self._settings)
        look = await self._engine.call(lambda engine: engine.reuse.look(prompt, request.prompt.cache_salt))
        if self._shared is not None and not all(look.coverage.images):
            look = await asyncio.to_thread(look.further, self._shared.covers)
        coverage = look.coverage
        return worker_pb2.ProbeCacheResponse(
            cached_tokens=coverage.cached_tokens,
            prompt_tokens=len(prompt.token_ids),
            images_covered=[covered and policy is VisualKvPolicy.EXACT for covered in coverage.images],
        )

    async def InspectCache(self, request: worker_pb2.InspectCacheRequest, context: Context) -> worker_pb2.CacheReport:
        """Tells what the KV cache holds; see worker.proto."""
        return await self._engine.call(lambda engine: inspection.report(engine, request.max_images))

    async def DropCached(
        self, request: worker_pb2.DropCachedRequest, context: Context
    ) -> worker_pb2.DropCachedResponse:
        """Forgets KV; see worker.proto."""
        blocks = await inspection.drop(self._engine, self._model.engine.reuse.hierarchy, request)
        return worker_pb2.DropCachedResponse(blocks=blocks)

    async def PinImage(self, request: worker_pb2.PinImageRequest, context: Context) -> worker_pb2.PinImageResponse:
        """Keeps an image's KV; see worker.proto."""
        await self._engine.call(lambda engine: inspection.pin(engine, request))
        return worker_pb2.PinImageResponse()

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WorkerLoad]:
        """Streams the load; see worker.proto."""
        sent: Load | None = None
        sent_at_s = 0.0
        while not self._stopping:
            load, now_s = self._engine.load, time.monotonic()
            if load != sent or (now_s - sent_at_s >= _LOAD_SIGN_OF_LIFE_S and self.makes_progress()):
                yield self._to_load(load)
                sent, sent_at_s = load, now_s
            await asyncio.sleep(_LOAD_INTERVAL_S)

    def makes_progress(self) -> bool:
        """Whether the engine has computed something, or had nothing to do, within `stall_timeout_s`."""
        return self._engine.seconds_without_progress() < self._settings.stall_timeout_s

    def stop(self) -> None:
        """Ends the streams that would never end by themselves."""
        self._stopping = True

    def _to_load(self, load: Load) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(
            model=self._description,
            waiting=load.waiting,
            running=load.running,
            total_blocks=load.total_blocks,
            used_blocks=load.used_blocks,
            cached_blocks=load.cached_blocks,
        )


def _to_choice(choice: TokenChoice) -> generation_pb2.TokenChoice:
    chosen, *top = (generation_pb2.TokenLogprob(text=t, logprob=p) for t, p in (choice.chosen, *choice.top))
    return generation_pb2.TokenChoice(chosen=chosen, top=top)


def _to_response(event: Event) -> worker_pb2.WorkerGenerateResponse:
    if isinstance(event, Queued):
        return worker_pb2.WorkerGenerateResponse(started=worker_pb2.WorkerStarted(prompt_tokens=event.prompt_tokens))
    if isinstance(event, Text):
        return worker_pb2.WorkerGenerateResponse(
            chunk=generation_pb2.Chunk(
                text=event.text, token_count=event.token_count, tokens=map(_to_choice, event.choices)
            )
        )
    if isinstance(event, Completed):
        usage = event.usage
        finished = worker_pb2.WorkerFinished(
            finish_reason=_FINISH_REASONS[event.reason],
            usage=generation_pb2.Usage(
                text_tokens=usage.text_tokens,
                visual_tokens=usage.visual_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens,
            ),
            durations=stage_durations(event.timeline, time.time_ns()),
            visual_kv=generation_pb2.VisualKvReport(
                policy=event.visual_kv.proto, lossy=event.visual_kv.lossy, saved_bytes=event.saved_bytes
            ),
        )
        return worker_pb2.WorkerGenerateResponse(finished=finished)
    if isinstance(event, Retracted):
        return worker_pb2.WorkerGenerateResponse(retracted=generation_pb2.Retracted())
    raise TypeError(f"{type(event).__name__} has no response")
