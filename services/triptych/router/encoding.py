"""The last step before the worker: features of the images that it does not have yet."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from opentelemetry.trace import SpanKind

from triptych.config import RouterSettings
from triptych.errors import StageTimeout
from triptych.router.drafting import Drafting
from triptych.router.request import ImageState, RequestState
from triptych.router.working import in_thread, run_all
from triptych.telemetry.spans import open_span
from triptych.v1 import inference_pb2
from triptych.vision.cache import EncoderCache, Features
from triptych.vision.encoder import Encoder, encode_timeout
from triptych.vision.reduction import reduce_tokens
from triptych.vision.reduction_spec import Reduction


class Encode:
    """Second look-up, the encoder cache, and the encoder for what is still missing.

    Late encoding makes the answer text-only where the client allows it. Run a second time with `everything`, after
    the worker turned out to have lost what it covered, it fetches features for covered images as well.
    """

    def __init__(
        self,
        settings: RouterSettings,
        encoder: Encoder,
        cache: EncoderCache,
        threads: ThreadPoolExecutor,
        drafting: Drafting,
    ) -> None:
        self._timeout_s = settings.encode_timeout_s
        self._encoder = encoder
        self._cache = cache
        self._threads = threads
        self._drafting = drafting

    async def run(self, state: RequestState, *, everything: bool = False) -> None:
        """Sets `lease` and `feature_source` of every image that the worker's KV does not cover.

        With a draft (`state.draft`), leases may come later.
        """
        await state.drop_draft()
        covered = inference_pb2.FEATURE_SOURCE_KV_CACHE
        missing = [
            image for image in state.images if image.lease is None and (everything or image.feature_source != covered)
        ]
        if not missing:
            return
        timeout_s = state.within_deadline(self._timeout_s)
        # A stage that did not happen has no duration; waiting for somebody else's encode is one that did.
        waits = any(image.identity not in self._cache for image in missing)
        try:
            if waits and not everything and self._drafting.wanted(state):
                await self._drafting.begin(state, missing, self._fetch_timed(missing, state, timeout_s))
            elif waits:
                await self._fetch_timed(missing, state, timeout_s)
            else:
                await self._fetch(missing, state, timeout_s)
        except StageTimeout:
            state.check_deadline()
            if not state.degradable:
                raise
            self._drop_images(state)

    async def _fetch_timed(self, missing: list[ImageState], state: RequestState, timeout_s: float) -> None:
        with state.timed("encode"):
            await self._fetch(missing, state, timeout_s)

    async def _fetch(self, missing: list[ImageState], state: RequestState, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await run_all(self._fetch_one(image, state, timeout_s) for image in missing)
        except TimeoutError:
            raise encode_timeout(timeout_s) from None

    async def _fetch_one(self, image: ImageState, state: RequestState, timeout_s: float) -> None:
        async def features() -> Features:
            if image.reduction is None:
                return await encode()
            # What another request left unreduced saves an encode; otherwise only what is asked for is kept.
            if image.encoder_identity in self._cache:
                whole = await self._cache.get(image.encoder_identity, encode)
                try:
                    return await self._reduce(whole.features, image.reduction, state)
                finally:
                    whole.release()
            return await self._reduce(await encode(), image.reduction, state)

        async def encode() -> Features:
            assert image.pixels is not None  # Set by Preprocess, which ran before.
            attributes: dict[str, str | int | float | bool] = {
                "triptych.feature_source": "encoder",
                "triptych.pixels": image.side * image.side,
                "triptych.visual_tokens": image.encoder_tokens,
            }
            with open_span("router.encode", state.trace, SpanKind.CLIENT, attributes) as (_, context):
                return await self._encoder.encode(
                    image.pixels, timeout_s, context, priority=state.encode_class, version=image.encoder_version
                )

        lease = await self._cache.get(image.identity, features)
        image.lease = lease
        image.feature_source = (
            inference_pb2.FEATURE_SOURCE_ENCODER if lease.encoded else inference_pb2.FEATURE_SOURCE_ENCODER_CACHE
        )

    async def _reduce(self, features: Features, reduction: Reduction, state: RequestState) -> Features:
        attributes: dict[str, str | int | float | bool] = {
            "triptych.reduction": str(reduction),
            "triptych.encoder_tokens": len(features),
            "triptych.visual_tokens": reduction.tokens,
        }
        with state.timed("reduce"), open_span("router.reduce", state.trace, attributes=attributes):
            reduced: Features = (await in_thread(self._threads, reduce_tokens, features[np.newaxis], reduction))[0]
            return reduced

    def _drop_images(self, state: RequestState) -> None:
        state.release()
        state.images_dropped = True
        for image in state.images:
            image.feature_source = inference_pb2.FEATURE_SOURCE_UNSPECIFIED
        state.degradations.append(
            inference_pb2.Degradation(
                kind=inference_pb2.DEGRADATION_KIND_TEXT_ONLY,
                explanation=f"the images were not encoded within encode_timeout_s={self._timeout_s:g} and left out",
            )
        )
