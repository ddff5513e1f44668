"""The encoder as the router sees it, and what a single Triton is asked."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt
from opentelemetry.context import Context
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from triptych.errors import EncoderChanged, Overloaded, StageTimeout, TriptychError
from triptych.rpc.channel import OPTIONS
from triptych.triton.readiness import pending_requests
from triptych.triton.tracing import trace_arguments
from triptych.vision.encoder_spec import EncoderSpec, newest, unready
from triptych.vision.encoder_versions import read_versions
from triptych.vision.preprocess import Pixels
from triptych.vision.scheduler import EncodeClass
from triptych.vision.shared_input import Region, SharedRegions

log = logging.getLogger(__name__)

Features = npt.NDArray[np.float32]

_INPUT, _OUTPUT = "pixel_values", "image_features"

_COPY_BYTES = 4 << 20
"""Copies of this size or more are made off the event loop; this many bytes take about a millisecond."""


class Encoder(Protocol):
    """Turns preprocessed pixels into projected features; what is behind it, batches and several Tritons, is its own."""

    @property
    def spec(self) -> EncoderSpec | None:
        """What the encoder needs and gives; None until it was first reached. Kept while the encoder is away."""

    @property
    def ready(self) -> bool:
        """Whether the encoder answered the last `refresh`."""

    async def refresh(self, timeout_s: float) -> bool:
        """Looks whether the encoder is ready, reads its spec if so, and returns `ready`. Never raises."""

    def expect(self) -> AbstractContextManager[None]:
        """For the length of the block, an image is on its way here: an idle encoder may wait for it a moment."""

    async def encode(
        self,
        pixels: Pixels,
        timeout_s: float,
        trace: Context | None = None,
        *,
        priority: EncodeClass = EncodeClass.STANDARD,
        version: str | None = None,
    ) -> Features:
        """Returns the features of one image: [3, side, side] to [tokens, hidden_size], float32, all finite.

        They come from `version` of the encoder, None being the newest. Cancelling the caller cancels the work.
        Raises StageTimeout (ENCODE_TIMEOUT), Overloaded (ENCODER_OVERLOADED), Unavailable (ENCODER_UNAVAILABLE),
        EncoderChanged when the version is no longer served, InvalidRequest (ENCODE_TOO_LARGE), or TriptychError
        (ENCODER_FAILED) when the answer is not what was promised.
        """

    def check_integrity(self) -> None:
        """Raises IntegrityError unless its books add up."""

    async def close(self) -> None:
        """Ends all connections."""


class Endpoint(Protocol):
    """One server that encodes batches."""

    @property
    def address(self) -> str:
        """Its name in logs, spans and metrics."""

    @property
    def versions(self) -> Mapping[str, EncoderSpec]:
        """The versions it served when last reached, by name."""

    @property
    def ready(self) -> bool:
        """Whether it answered the last `refresh`."""

    @property
    def pending(self) -> int:
        """Requests that wait in it, ours included, as it last said; 0 where it does not say."""

    async def refresh(self, timeout_s: float) -> bool:
        """Looks whether it is ready and what it serves, and returns `ready`. Never raises."""

    async def run(
        self, images: Sequence[Pixels], version: str, timeout_s: float, traces: Sequence[Context | None] = ()
    ) -> Features:
        """Returns the features of images of one shape: n of [3, height, width] to [n, tokens, hidden_size], float32.

        They may hold values that are not finite. `traces` are the images' callers. Raises as `Encoder.encode`.
        """

    async def close(self) -> None:
        """Ends all connections."""


class TritonEncoder:
    """The vision model of one Triton, over gRPC; pixels go through shared memory where that can be."""

    def __init__(
        self, address: str, model: str, *, shared_memory: bool = True, metrics_address: str | None = None
    ) -> None:
        """`metrics_address` is where Triton tells Prometheus how many requests wait in it; None: `pending` stays 0."""
        self._address = address
        self._metrics_address = metrics_address
        self._pending = 0
        self._model = model
        self._client = InferenceServerClient(address, channel_args=OPTIONS)
        self._regions = SharedRegions(self._client) if shared_memory else None
        self._versions: Mapping[str, EncoderSpec] = {}
        self._ready = False
        self._obstacle = ""  # What was last logged, so that a poll each second does not fill the log.

    @property
    def address(self) -> str:
        """See Endpoint."""
        return self._address

    @property
    def versions(self) -> Mapping[str, EncoderSpec]:
        """See Endpoint."""
        return self._versions

    @property
    def ready(self) -> bool:
        """See Endpoint."""
        return self._ready

    @property
    def pending(self) -> int:
        """See Endpoint."""
        return self._pending

    async def refresh(self, timeout_s: float) -> bool:
        """See Endpoint. Reading everything each time costs a few small calls and notices a new version by itself."""
        try:
            versions = await read_versions(self._client, self._model, timeout_s)
        except (InferenceServerException, TriptychError, grpc.RpcError) as error:
            if str(error) != self._obstacle:
                log.warning("encoder at %s is not usable: %s", self._address, error)
            self._ready, self._obstacle = False, str(error)
            return False
        if versions != self._versions or not self._ready:
            log.info("encoder at %s is ready: %s version %s", self._address, self._model, newest(versions).version)
        self._versions, self._ready, self._obstacle = versions, True, ""
        if self._metrics_address is not None:
            self._pending = await asyncio.to_thread(pending_requests, self._metrics_address, timeout_s)
        return True

    async def run(
        self, images: Sequence[Pixels], version: str, timeout_s: float, traces: Sequence[Context | None] = ()
    ) -> Features:
        """See Endpoint."""
        spec = self._versions.get(version)
        if spec is None:
            raise EncoderChanged(f"version {version} of the vision encoder is not served at {self._address}")
        region = await self._regions.take(len(images) * images[0].nbytes) if self._regions is not None else None
        try:
            batch = await _in_background(len(images) * images[0].nbytes, _batch_input, images, region)
            result = await self._client.infer(
                spec.model,
                [batch],
                outputs=[InferRequestedOutput(_OUTPUT)],
                client_timeout=timeout_s,
                **trace_arguments(*traces),
            )
        except InferenceServerException as error:
            if region is not None and "shared memory region" in str(error.message()):
                # Triton was restarted: it knows no region any more.
                return await self._run_again(region, images, version, timeout_s, traces)
            raise _from_triton(error, timeout_s) from None
        finally:
            if region is not None and self._regions is not None:
                self._regions.give(region)
        return _checked(result.as_numpy(_OUTPUT), len(images), spec, images[0].shape[1:])

    async def _run_again(
        self, region: Region, images: Sequence[Pixels], version: str, timeout_s: float, traces: Sequence[Context | None]
    ) -> Features:
        assert self._regions is not None  # The region is one of its.
        self._regions.give(region)
        self._regions.forget()
        return await self.run(images, version, timeout_s, traces)

    async def close(self) -> None:
        """See Endpoint."""
        if self._regions is not None:
            await self._regions.close()
        await self._client.close()


def _batch_input(images: Sequence[Pixels], region: Region | None) -> InferInput:
    """Returns images of one shape as Triton's input, their bytes in the region or, without one, in the message."""
    batch = InferInput(_INPUT, [len(images), *images[0].shape], "FP32")
    if region is not None:
        batch.set_shared_memory(region.name, region.write(images))
    else:
        batch.set_data_from_numpy(images[0][np.newaxis] if len(images) == 1 else np.stack(images))
    return batch


async def _in_background(size_bytes: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that copies so many bytes: in a thread where that would hold up the event loop.

    A caller that is cancelled meanwhile goes on only when the copy is done: its target may then be used for others.
    """
    if size_bytes < _COPY_BYTES:
        return function(*arguments)
    copying = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(copying)
    finally:
        while not copying.done():  # However often it is cancelled.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((copying,))


def _checked(features: Any, images: int, spec: EncoderSpec, size: tuple[int, ...]) -> Features:
    """Returns a batch's features after making sure that their shape is what the spec promises.

    An empty output without an error is what a numpy that does not fit Triton's Python backend gives.
    """
    promised = (images, spec.token_count(*size), spec.hidden_size)
    if features is None or features.shape != promised or features.dtype != np.float32:
        shape = None if features is None else (*features.shape, str(features.dtype))
        raise TriptychError(
            f"the encoder returned {shape} where {(*promised, 'float32')} was expected", reason="ENCODER_FAILED"
        )
    checked: Features = features
    return checked


def _from_triton(error: InferenceServerException, timeout_s: float) -> TriptychError:
    code, message = str(error.status()), str(error.message())
    if code == "StatusCode.DEADLINE_EXCEEDED" or "timeout expired" in message:
        return encode_timeout(timeout_s)
    # Triton says UNAVAILABLE for a full queue, too.
    if code == "StatusCode.RESOURCE_EXHAUSTED" or "maximum queue size" in message:
        return Overloaded("the encoder's queue is full; try again later", reason="ENCODER_OVERLOADED")
    if code == "StatusCode.NOT_FOUND" or "unknown model" in message:
        return EncoderChanged(f"a version of the vision encoder is no longer served: {message}")
    gone = ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED", "StatusCode.UNKNOWN")
    if code in gone or "not healthy" in message:
        return unready(message)
    return TriptychError(f"the encoder failed: {message}", reason="ENCODER_FAILED")


def encode_timeout(timeout_s: float) -> StageTimeout:
    """Returns the error for an encode that missed its deadline."""
    return StageTimeout(
        f"encoding took longer than {timeout_s:.3g} s (encode_timeout_s, or what the call's own deadline left of it)",
        reason="ENCODE_TIMEOUT",
    )
