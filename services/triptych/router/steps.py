"""The steps of a request before the worker answers, in the order in which the pipeline runs them.

The contract: a step reads what earlier steps wrote into the RequestState, writes its own part, and raises a
TriptychError when the request cannot go on. It may be cancelled at any await and then leaves nothing behind but what
`RequestState.release` gives up.
"""

import logging
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from triptych.config import RouterSettings
from triptych.errors import InvalidRequest, TriptychError, Unavailable
from triptych.router.holding import Holding
from triptych.router.request import ImageState, RequestState
from triptych.router.resolution import ResolutionManager, detail_name, reason_name
from triptych.router.validation import check_draft_fits, validate
from triptych.router.worker_client import WorkerClient
from triptych.router.working import in_thread, run_all
from triptych.telemetry.spans import open_span
from triptych.v1 import inference_pb2
from triptych.vision.cache import EncoderCache
from triptych.vision.encoder import Encoder
from triptych.vision.encoder_spec import EncoderSpec
from triptych.vision.identity import content_digest, identity
from triptych.vision.image_header import ImageLimits
from triptych.vision.images import encoded_bytes, load_image
from triptych.vision.preprocess import preprocess
from triptych.vision.reduction_spec import Reduction, from_message, parse_reduction
from triptych.vision.resolution import encoded_side

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 1.0
"""Most seconds spent on asking the worker what its KV covers; later, the answer is taken for "nothing"."""


class Step(Protocol):
    """One step of the pipeline; the module's docstring has the contract."""

    async def run(self, state: RequestState) -> None:
        """Does the step's work for one request."""


class Intake:
    """Validates the request, then unpacks each image's file and checks its header against the limits."""

    def __init__(self, settings: RouterSettings, worker: WorkerClient, threads: ThreadPoolExecutor) -> None:
        self._settings = settings
        self._worker = worker
        self._limits = image_limits(settings)
        self._reduction = parse_reduction(settings.token_reduction)
        self._threads = threads

    async def run(self, state: RequestState) -> None:
        """Sets `state.reduction` and `state.images`, each with `encoded`."""
        with state.timed("intake"), open_span("router.intake", state.trace):
            validate(state.request, self._settings)
            state.reduction = from_message(state.request.reduction, self._reduction)
            check_draft_fits(state.request.draft, state.reduction)
            state.images = [
                ImageState(
                    source=part.image.data if part.image.WhichOneof("source") == "data" else part.image.url,
                    requested=part.image.detail or inference_pb2.IMAGE_DETAIL_HIGH,
                )
                for message in state.request.messages
                for part in message.parts
                if part.HasField("image")
            ]
            if state.images and self._worker.alive and self._worker.model.text_only:
                raise InvalidRequest("this model takes no images", reason="IMAGES_UNSUPPORTED")
            await run_all(self._open(image) for image in state.images)

    async def _open(self, image: ImageState) -> None:
        image.encoded = await in_thread(self._threads, encoded_bytes, image.source, self._limits)
        image.source = b""


class Preprocess:
    """Decodes, resizes and names the images, off the event loop."""

    def __init__(
        self,
        settings: RouterSettings,
        encoder: Encoder,
        cache: EncoderCache,
        threads: ThreadPoolExecutor,
        resolution: ResolutionManager,
        holding: Holding,
    ) -> None:
        self._queue_timeout_s = settings.queue_timeout_s
        self._holding = holding
        self._limits = image_limits(settings)
        self._encoder = encoder
        self._cache = cache
        self._threads = threads
        self._resolution = resolution

    async def run(self, state: RequestState) -> None:
        """Sets each image's resolution, size, side, token counts, pixels and identities; drops its encoded file."""
        if not state.images:
            return
        spec = self._encoder.spec
        if spec is None:
            raise Unavailable("the vision encoder has not been reached yet", reason="ENCODER_UNAVAILABLE")
        self._resolution.choose(state)
        # As much as what was asked for would take: a lowered image may be prepared as asked after all.
        size_bytes = sum(held_bytes(spec, encoded_side(image.requested, spec)) for image in state.images)
        state.hold = await self._holding.acquire(size_bytes, state.within_deadline(self._queue_timeout_s))
        with state.timed("preprocess"), self._encoder.expect():
            await run_all(self._prepare(image, state, spec) for image in state.images)
        self._resolution.note(state)

    async def _prepare(self, image: ImageState, state: RequestState, spec: EncoderSpec) -> None:
        state.check_deadline()
        with open_span("router.preprocess", state.trace) as (span, _):
            salt = state.request.cache_salt
            await in_thread(
                self._threads, _prepare_image, image, spec, salt, state.reduction, self._limits, self._cache
            )
            span.set_attributes(
                {
                    "triptych.pixels": image.width * image.height,
                    "triptych.image.side": image.side,
                    "triptych.image.detail": detail_name(image.detail),
                    "triptych.image.resolution_reason": reason_name(image.resolution_reason),
                }
            )


class Probe:
    """First look-up: asks the worker which images its KV covers, so that they need no features."""

    def __init__(self, worker: WorkerClient, encoder: Encoder) -> None:
        self._worker = worker
        self._encoder = encoder

    async def run(self, state: RequestState) -> None:
        """Sets `feature_source` of covered images. A probe that fails costs an encode, not the request."""
        if not state.images:
            return
        timeout_s = state.within_deadline(PROBE_TIMEOUT_S)
        with open_span("router.probe", state.trace) as (span, context), self._encoder.expect():
            try:
                covered = await self._worker.probe(state.prompt(), state.request.visual_kv, timeout_s, context)
            except InvalidRequest:
                raise
            except TriptychError as error:
                log.warning("request %s: the KV look-up failed: %s", state.request_id, error.reason)
                covered = []
            for image, is_covered in zip(state.images, covered, strict=False):
                if is_covered:
                    image.feature_source = inference_pb2.FEATURE_SOURCE_KV_CACHE
            span.set_attribute("triptych.images.covered", sum(covered))


def held_bytes(spec: EncoderSpec, side: int) -> int:
    """Returns the bytes of an image's pixels and features."""
    return 4 * (3 * side * side + spec.token_count(side) * spec.hidden_size)


def image_limits(settings: RouterSettings) -> ImageLimits:
    """Returns the limits of a single image."""
    return ImageLimits(settings.max_image_bytes, settings.max_image_pixels)


def _prepare_image(
    image: ImageState,
    spec: EncoderSpec,
    salt: str,
    reduction: Reduction | None,
    limits: ImageLimits,
    cache: Container[bytes],
) -> None:
    """Fills in what Preprocess promises. Peak memory is that of one decoded image, however many wait."""
    assert image.encoded is not None  # Set by Intake, which ran before.
    picture = load_image(image.encoded, limits)
    image.encoded = None
    image.width, image.height = picture.size
    content = content_digest(picture)
    if image.detail > image.requested and image.resolution_reason != inference_pb2.RESOLUTION_REASON_ECONOMY:
        # Load lowered it. Features that are there cost nothing, and a dialogue goes on with the picture it began with.
        side = encoded_side(image.requested, spec)
        known = (identity(content, spec, side, salt, each) for each in (None, _applied(reduction, spec, side)))
        if any(name in cache for name in known):
            image.detail, image.resolution_reason = image.requested, inference_pb2.RESOLUTION_REASON_REQUESTED
    image.side = encoded_side(image.detail, spec)
    image.encoder_tokens = spec.token_count(image.side)
    image.reduction = _applied(reduction, spec, image.side)
    image.encoder_version = spec.version
    image.encoder_identity = identity(content, spec, image.side, salt)
    image.identity = identity(content, spec, image.side, salt, image.reduction)
    image.pixels = preprocess(picture, spec, image.side)


def _applied(reduction: Reduction | None, spec: EncoderSpec, side: int) -> Reduction | None:
    """Returns a reduction where it makes an image's tokens fewer, else None."""
    return reduction if reduction is not None and reduction.tokens < spec.token_count(side) else None
