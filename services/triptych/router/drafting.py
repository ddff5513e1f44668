"""Draft encoding: a request goes on with a small encoder's features while the encoder still runs.

`begin` starts both at once. Where the draft's features come first, the worker gets them and holds its words back;
`settle` waits for the encoder's, compares, and tells the worker to go on or to start again from the first image.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import SpanKind
from prometheus_client import Counter

from triptych import tensors
from triptych.config import RouterSettings
from triptych.errors import InvalidRequest, StageTimeout, TriptychError, Unavailable
from triptych.router.request import ImageState, RequestState
from triptych.router.worker_client import WorkerClient
from triptych.router.working import in_thread, run_all
from triptych.telemetry.spans import open_span
from triptych.v1 import inference_pb2, worker_pb2
from triptych.vision.cache import EncoderCache, Features
from triptych.vision.draft_report import outcome_name
from triptych.vision.encoder import Encoder
from triptych.vision.encoder_spec import EncoderSpec
from triptych.vision.identity import draft_identity
from triptych.vision.similarity import Similarity, similarity_of

log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""Seconds between two looks at the draft encoder, made when a request wants it."""

REFRESH_TIMEOUT_S = 1.0
SETTLE_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class Draft:
    """What a request goes on with until its verdict.

    Attributes:
        name: Under which the worker takes the verdict.
        target: Fetches the encoder's features: it sets the leases of all images.
    """

    name: str
    target: "asyncio.Task[None]"


class Drafting:
    """Begins and settles drafts. One for all requests of a router."""

    def __init__(
        self,
        settings: RouterSettings,
        encoder: Encoder,
        draft_encoder: Encoder,
        cache: EncoderCache,
        worker: WorkerClient,
        threads: ThreadPoolExecutor,
        outcomes: Counter,
    ) -> None:
        self._settings = settings
        self._encoder = encoder
        self._draft_encoder = draft_encoder
        self._cache = cache
        self._worker = worker
        self._threads = threads
        self._outcomes = outcomes
        self._looked_s = float("-inf")
        self._looking: asyncio.Task[bool] | None = None

    def close(self) -> None:
        """Ends what runs beside the requests."""
        if self._looking is not None:
            self._looking.cancel()

    def wanted(self, state: RequestState) -> bool:
        """Tells whether a request is to begin with a draft where an image needs encoding."""
        mode = state.request.draft.mode
        if mode == inference_pb2.DRAFT_MODE_UNSPECIFIED:
            return self._settings.speculative_vision and state.reduction is None
        return mode == inference_pb2.DRAFT_MODE_ON

    async def begin(self, state: RequestState, missing: list[ImageState], target: Coroutine[Any, Any, None]) -> bool:
        """Runs `target`, which fetches the missing images' features, beside the draft encoder.

        Returns True, with `state.draft` set and the images' draft leases held, when the draft's features came first;
        False when the encoder's did. Raises what `target` raises; a draft that fails only costs its advantage.
        """
        unknown = [image for image in missing if image.identity not in self._cache]
        fetching = asyncio.create_task(target, name="encode beside a draft")
        drafting = asyncio.create_task(self._fetch_drafts(unknown, state), name="draft")
        try:
            await asyncio.wait({fetching, drafting}, return_when=asyncio.FIRST_COMPLETED)
            error = drafting.exception() if drafting.done() else None
            if drafting.done() and error is None and not fetching.done():
                state.draft = Draft(uuid.uuid4().hex, fetching)
                for image in unknown:
                    image.feature_source = inference_pb2.FEATURE_SOURCE_DRAFT
                return True
            state.draft_report = inference_pb2.DraftReport(outcome=inference_pb2.DRAFT_OUTCOME_UNNEEDED)
            if isinstance(error, TriptychError):
                log.info("request %s: no draft: %s", state.request_id, error.message)
                state.draft_report.outcome = inference_pb2.DRAFT_OUTCOME_UNAVAILABLE
            elif error is not None:
                raise error
            self._outcomes.labels(outcome_name(state.draft_report)).inc()
            await fetching
            return False
        finally:
            if state.draft is None:
                drafting.cancel()
                fetching.cancel()
                await asyncio.gather(drafting, fetching, return_exceptions=True)
                for image in unknown:
                    image.release_draft()

    async def settle(self, state: RequestState) -> None:
        """Waits for the encoder's features, compares, and gives the worker the verdict; the draft has ended then.

        Raises what fetching the features and the worker raise; but where the encoder is late and the client takes a
        worse answer, the draft is kept unchecked.
        """
        draft = state.draft
        assert draft is not None
        report = inference_pb2.DraftReport(outcome=inference_pb2.DRAFT_OUTCOME_KEPT)
        with open_span("router.verify", state.trace) as (span, context), ExitStack() as shared:
            try:
                await draft.target
            except StageTimeout:
                state.check_deadline()
                if not state.degradable:
                    raise
                report.outcome = inference_pb2.DRAFT_OUTCOME_UNVERIFIED
                state.degradations.append(self._unverified())
            else:
                found: Similarity = await in_thread(self._threads, _least_similar, state.images)
                report.similarity, report.lowest_similarity = found
                if not found.mean >= self._threshold(state):
                    report.outcome = inference_pb2.DRAFT_OUTCOME_REJECTED
            keep = report.outcome != inference_pb2.DRAFT_OUTCOME_REJECTED
            verdict = worker_pb2.SettleDraftRequest(id=draft.name, keep=keep)
            if not keep:
                verdict.images.extend(
                    _final(image, shared if self._settings.shared_memory else None) for image in state.images
                )
            try:
                report.drafted_tokens = await self._worker.settle(verdict, SETTLE_TIMEOUT_S, context)
            except InvalidRequest as error:
                if error.reason != "DRAFT_UNKNOWN":  # The generation has ended with an error, which its stream tells.
                    raise
            span.set_attributes(
                {
                    "triptych.draft.outcome": outcome_name(report),
                    "triptych.draft.similarity": report.similarity,
                    "triptych.draft.lowest_similarity": report.lowest_similarity,
                    "triptych.draft.threshold": self._threshold(state),
                    "triptych.draft.tokens": report.drafted_tokens,
                }
            )
        self._outcomes.labels(outcome_name(report)).inc()
        state.draft_report = report
        state.draft = None
        state.release()

    def _threshold(self, state: RequestState) -> float:
        options = state.request.draft
        return options.threshold if options.HasField("threshold") else self._settings.draft_threshold

    def _unverified(self) -> inference_pb2.Degradation:
        return inference_pb2.Degradation(
            kind=inference_pb2.DEGRADATION_KIND_UNVERIFIED_DRAFT,
            explanation="the answer is made from the draft encoder's features, as the encoder was not done within "
            f"encode_timeout_s={self._settings.encode_timeout_s:g}",
        )

    async def _fetch_drafts(self, images: list[ImageState], state: RequestState) -> None:
        if not images:
            await asyncio.Event().wait()  # Nothing to draft: the encoder cache has them all.
        spec = await self._look()
        with state.timed("draft"):
            await run_all(self._fetch_draft(image, state, spec) for image in images)

    async def _look(self) -> EncoderSpec:
        """Returns what the draft encoder is. Raises Unavailable when it does not answer or does not fit."""
        if self._looking is None or (self._looking.done() and time.monotonic() - self._looked_s > REFRESH_S):
            self._looked_s = time.monotonic()
            self._looking = asyncio.create_task(self._draft_encoder.refresh(REFRESH_TIMEOUT_S), name="look at drafts")
        if not self._draft_encoder.ready:  # Otherwise what was seen last will do, and looking costs nobody time.
            await asyncio.shield(self._looking)
        draft, target = self._draft_encoder.spec, self._encoder.spec
        if draft is None or not self._draft_encoder.ready:
            raise Unavailable(
                f"Triton's model {self._settings.draft_model} does not answer; triptych export --draft writes it",
                reason="DRAFT_UNAVAILABLE",
            )
        if target is None or _shape(draft) != _shape(target):
            raise Unavailable(
                "the draft encoder's pixels or features are not those of the encoder; export both from one checkpoint",
                reason="DRAFT_UNAVAILABLE",
            )
        return draft

    async def _fetch_draft(self, image: ImageState, state: RequestState, spec: EncoderSpec) -> None:
        async def encode() -> Features:
            assert image.pixels is not None  # Set by Preprocess, which ran before.
            attributes: dict[str, str | int | float | bool] = {
                "triptych.feature_source": "draft",
                "triptych.visual_tokens": image.token_count,
            }
            with open_span("router.draft", state.trace, SpanKind.CLIENT, attributes) as (_, context):
                timeout_s = self._settings.encode_timeout_s
                return await self._draft_encoder.encode(image.pixels, timeout_s, context, priority=state.encode_class)

        image.draft_identity = draft_identity(image.identity, spec)
        image.draft_lease = await self._cache.get(image.draft_identity, encode)


def _least_similar(images: list[ImageState]) -> Similarity:
    """Returns the similarity of the image whose features are least alike, and the lowest token of all."""
    found = [
        similarity_of(image.draft_lease.features, image.lease.features)
        for image in images
        if image.draft_lease is not None and image.lease is not None
    ]
    return Similarity(min(each.mean for each in found), min(each.lowest for each in found))


def _final(image: ImageState, shared: ExitStack | None) -> worker_pb2.PromptImage:
    """Returns an image with the encoder's features, or an empty message where it had them from the start."""
    if image.draft_lease is None or image.lease is None:
        return worker_pb2.PromptImage()
    return worker_pb2.PromptImage(
        identity=image.identity,
        token_count=image.token_count,
        features=tensors.sent(image.lease.features, shared),
    )


def _shape(spec: EncoderSpec) -> tuple[str, int, int]:
    return spec.preprocessing, spec.hidden_size, spec.token_count(spec.image_side)
