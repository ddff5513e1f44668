"""From a request to its events: the steps in order, then the worker's words."""

import logging
import time
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind

from triptych.config import RouterSettings
from triptych.errors import EncoderChanged, FeaturesRequired, TriptychError, Unavailable
from triptych.router.admission import Admission, image_bytes_of
from triptych.router.drafting import Drafting
from triptych.router.encoding import Encode
from triptych.router.holding import Holding
from triptych.router.metrics import RouterMetrics
from triptych.router.readiness import REFRESH_TIMEOUT_S
from triptych.router.request import RequestState
from triptych.router.resolution import ResolutionManager
from triptych.router.steps import Intake, Preprocess, Probe, Step
from triptych.router.verdict import WithVerdict
from triptych.router.worker_client import WorkerClient
from triptych.telemetry.spans import open_span
from triptych.telemetry.tracing import trace_id_of
from triptych.v1 import generation_pb2, inference_pb2, worker_pb2
from triptych.vision.cache import EncoderCache
from triptych.vision.encoder import Encoder
from triptych.vision.resolution import Load
from triptych.vision.shared_features import open_shared_features
from triptych.visual_kv import policy_name

log = logging.getLogger(__name__)

_ENCODER_CHANGES = 3
"""How often a request's images are named anew because the encoder was replaced meanwhile."""


class Pipeline:
    """Runs requests. Owns the threads for image work and the encoder cache; encoders and worker are given."""

    def __init__(
        self,
        settings: RouterSettings,
        encoder: Encoder,
        draft_encoder: Encoder,
        worker: WorkerClient,
        metrics: RouterMetrics | None = None,
    ) -> None:
        self._metrics = metrics or RouterMetrics()
        self._settings = settings
        self._encoder = encoder
        self._draft_encoder = draft_encoder
        self._worker = worker
        self._threads = ThreadPoolExecutor(settings.preprocess_threads, thread_name_prefix="preprocess")
        self.admission = Admission(settings)
        self.cache = EncoderCache(settings.encoder_cache_bytes, open_shared_features(settings))
        self.holding = Holding(settings.max_held_bytes)
        self._resolution = ResolutionManager(
            settings, lambda: Load(worker.headroom, self.admission.pending), self._metrics.resolutions
        )
        self._drafting = Drafting(
            settings, encoder, draft_encoder, self.cache, worker, self._threads, self._metrics.drafts
        )
        self._encode = Encode(settings, encoder, self.cache, self._threads, self._drafting)
        self._steps: tuple[Step, ...] = (
            Intake(settings, worker, self._threads),
            Preprocess(settings, encoder, self.cache, self._threads, self._resolution, self.holding),
            Probe(worker, encoder),
            self._encode,
        )
        self._metrics.requests.set_function(lambda: self.admission.requests)
        self._metrics.held_bytes.set_function(lambda: self.holding.held_bytes)
        self._metrics.cache_bytes.set_function(lambda: self.cache.used_bytes)

    async def generate(
        self, request: inference_pb2.GenerateRequest, caller: Context, time_remaining_s: float | None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields one `started`, any number of `chunk`, one `finished`. Closing the generator cancels everything.

        `caller` is the trace context to continue; time_remaining_s is what the client's deadline leaves.
        """
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "triptych"}
        with (
            open_span("router.generate", caller, SpanKind.SERVER, attributes) as (span, context),
            self.admission.admit(image_bytes_of(request)) as answered,
        ):
            deadline_s = None if time_remaining_s is None else time.monotonic() + time_remaining_s
            state = RequestState(request, context, deadline_s, answered=answered)
            span.set_attribute("triptych.request_id", state.request_id)
            try:
                async with aclosing(self._answer(state, span)) as events:
                    async for event in events:
                        yield event
            except TriptychError as error:
                log.info("request %s failed: %s", state.request_id, error.reason)
                raise
            finally:
                await state.drop_draft()
                state.give_up_images()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every part's books add up, and, when no request runs, nothing is held."""
        self.admission.check_integrity()
        self._encoder.check_integrity()
        self._draft_encoder.check_integrity()
        if self.admission.requests:
            self.cache.check_integrity()
        else:
            self.cache.check_idle()
            self.holding.check_idle()

    def close(self) -> None:
        """Stops the threads; work that has not begun is dropped."""
        self._drafting.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.cache.close()

    async def _answer(self, state: RequestState, span: Span) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        await self._prepare(state)
        relay = Relay(state, span, self._worker, self._drafting, self._settings)
        try:
            async with aclosing(relay.run()) as events:
                async for event in events:
                    yield event
        except FeaturesRequired:
            # The KV that the probe saw was evicted meanwhile. The client learns nothing of it.
            if relay.chunks:
                raise
            try:
                await self._encode.run(state, everything=True)
            except EncoderChanged:
                await self._prepare_again(state)
        except EncoderChanged:
            # The encoder was replaced while a draft waited for its features.
            if relay.chunks:
                raise
            await self._prepare_again(state)
        else:
            return
        async with aclosing(relay.run()) as events:
            async for event in events:
                yield event

    async def _prepare(self, state: RequestState) -> None:
        """Runs the steps; from the start again when the encoder was replaced between an image's name and features."""
        for attempt in range(_ENCODER_CHANGES + 1):
            try:
                for step in self._steps:
                    await step.run(state)
                    state.check_deadline()
                break
            except EncoderChanged:
                state.start_over()
                if attempt == _ENCODER_CHANGES or not await self._encoder.refresh(REFRESH_TIMEOUT_S):
                    raise
                log.info("request %s: the encoder was replaced; naming its images anew", state.request_id)
        self._note_sources(state)

    async def _prepare_again(self, state: RequestState) -> None:
        await state.drop_draft()
        state.start_over()
        await self._prepare(state)

    def _note_sources(self, state: RequestState) -> None:
        """Counts what the three look-ups found, and writes it on the request's span."""
        sources = [image.feature_source for image in state.images]
        for source in sources:
            self._metrics.note_source(source)
        if sources:
            trace.get_current_span(state.trace).set_attributes(
                {
                    "triptych.images.kv_hits": sources.count(inference_pb2.FEATURE_SOURCE_KV_CACHE),
                    "triptych.images.embedding_hits": sources.count(inference_pb2.FEATURE_SOURCE_ENCODER_CACHE),
                    "triptych.images.encoded": sources.count(inference_pb2.FEATURE_SOURCE_ENCODER),
                    "triptych.images.drafted": sources.count(inference_pb2.FEATURE_SOURCE_DRAFT),
                }
            )


class Relay:
    """Asks the worker for one request's answer and turns its events into the client's."""

    def __init__(
        self, state: RequestState, span: Span, worker: WorkerClient, drafting: Drafting, settings: RouterSettings
    ) -> None:
        self._state = state
        self._span = span
        self._worker = worker
        self._drafting = drafting
        self._settings = settings
        self._started = False
        self.chunks = 0

    async def run(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Yields the client's events; run again after FeaturesRequired, it does not repeat `started`."""
        state, settings = self._state, self._settings
        model = self._check_model(self._worker.model)
        first_token_s = state.within_deadline(settings.queue_timeout_s + settings.prefill_timeout_s)
        finished = False
        async with AsyncExitStack() as stack:
            shared = stack.enter_context(ExitStack())
            _, context = stack.enter_context(open_span("router.worker", state.trace, SpanKind.CLIENT))
            request = state.worker_request(shared if settings.shared_memory else None)
            events = self._worker.generate(request, context, first_token_s, settings.next_token_timeout_s)
            with_verdict = WithVerdict(await stack.enter_async_context(aclosing(events)))
            async with aclosing(with_verdict):
                async for event in with_verdict:
                    kind = event.WhichOneof("event")
                    if kind == "started":
                        # The worker has read the features by now.
                        shared.close()
                        if not self._started:
                            self._started = True
                            yield inference_pb2.GenerateResponse(started=self._make_started(model))
                        if state.draft is None:
                            state.release()
                        else:
                            with_verdict.await_beside(self._drafting.settle(state))
                    elif kind == "retracted":
                        yield inference_pb2.GenerateResponse(retracted=event.retracted)
                    elif kind == "chunk":
                        state.first_token()
                        self.chunks += 1
                        yield inference_pb2.GenerateResponse(chunk=event.chunk)
                    elif kind == "finished":
                        await with_verdict.settled()
                        state.first_token()
                        finished = True
                        yield inference_pb2.GenerateResponse(finished=self._make_finished(event.finished))
        if not finished:
            raise Unavailable("the worker's answer ended before it was finished", reason="WORKER_UNAVAILABLE")

    def _check_model(self, model: worker_pb2.WorkerModel) -> worker_pb2.WorkerModel:
        self._span.set_attributes({"gen_ai.request.model": model.name, "gen_ai.response.model": model.name})
        leases = (image.draft_lease or image.lease for image in self._state.images)
        widths: Iterable[int] = (lease.features.shape[-1] for lease in leases if lease)
        if any(width != model.hidden_size for width in widths):
            raise model_mismatch(model)
        return model

    def _make_started(self, model: worker_pb2.WorkerModel) -> inference_pb2.Started:
        return inference_pb2.Started(
            request_id=self._state.request_id,
            model=model.name,
            trace_id=trace_id_of(self._span),
            images=[image.report() for image in self._state.images],
        )

    def _make_finished(self, finished: worker_pb2.WorkerFinished) -> inference_pb2.Finished:
        # The worker's own time to first token and total are left out: the client's clock started at the router.
        durations, measured = self._state.durations, finished.durations
        if measured.HasField("queue"):
            durations.queue.CopyFrom(measured.queue)
        if measured.HasField("prefill"):
            durations.prefill.CopyFrom(measured.prefill)
        if measured.HasField("decode"):
            durations.decode.CopyFrom(measured.decode)
        durations.total.FromNanoseconds(self._state.elapsed_ns())
        usage = finished.usage
        reason = generation_pb2.FinishReason.Name(finished.finish_reason).removeprefix("FINISH_REASON_").lower()
        self._span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.text_tokens + usage.visual_tokens,
                "gen_ai.usage.output_tokens": usage.output_tokens,
                "gen_ai.response.finish_reasons": [reason],
                "triptych.visual_tokens": usage.visual_tokens,
                "triptych.cached_tokens": usage.cached_tokens,
                "triptych.degraded": bool(self._state.degradations),
                "triptych.visual_kv": policy_name(finished.visual_kv.policy),
            }
        )
        return inference_pb2.Finished(
            finish_reason=finished.finish_reason,
            usage=usage,
            durations=durations,
            degradations=self._state.degradations,
            draft=self._state.draft_report,
            visual_kv=finished.visual_kv,
        )


def model_mismatch(model: worker_pb2.WorkerModel) -> Unavailable:
    """Returns the error for an encoder whose features the worker's decoder cannot take."""
    return Unavailable(
        f"the vision encoder's features do not fit model {model.name} (hidden size {model.hidden_size}); "
        "export the encoder from the checkpoint that the worker serves",
        reason="MODEL_MISMATCH",
    )
