"""The encoder as the router sees it, and its client for Triton."""

import logging
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt
from opentelemetry.context import Context
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from triptych.errors import Overloaded, StageTimeout, TriptychError, Unavailable
from triptych.rpc.channel import OPTIONS
from triptych.triton.tracing import trace_arguments
from triptych.vision.encoder_spec import PARAMETER, EncoderSpec, misconfigured, parse_encoder_spec
from triptych.vision.preprocess import Pixels

log = logging.getLogger(__name__)

Features = npt.NDArray[np.float32]

_INPUT, _OUTPUT = "pixel_values", "image_features"


class Encoder(Protocol):
    """Turns preprocessed pixels into projected features. One Triton, a pool of them, or a scheduler in front."""

    @property
    def spec(self) -> EncoderSpec | None:
        """What the encoder needs and gives; None until it was first reached. Kept while the encoder is away."""

    @property
    def ready(self) -> bool:
        """Whether the encoder answered the last `refresh`."""

    async def refresh(self, timeout_s: float) -> bool:
        """Looks whether the encoder is ready, reads its spec if so, and returns `ready`. Never raises."""

    async def encode(self, pixels: Pixels, timeout_s: float, trace: Context | None = None) -> Features:
        """Returns the features of one image: [3, side, side] to [tokens, hidden_size], float32, all finite.

        Cancelling the caller cancels the work. Raises StageTimeout (ENCODE_TIMEOUT), Overloaded (ENCODER_OVERLOADED),
        Unavailable (ENCODER_UNAVAILABLE) or TriptychError (ENCODER_FAILED) when the answer is not what was promised.
        """

    async def close(self) -> None:
        """Ends all connections."""


class TritonEncoder:
    """The model `vision` of one Triton, over gRPC.

    Images go one by one; Triton's dynamic batching joins those of equal shape.
    """

    def __init__(self, address: str, model: str) -> None:
        self._address = address
        self._model = model
        self._client = InferenceServerClient(address, channel_args=OPTIONS)
        self._spec: EncoderSpec | None = None
        self._ready = False
        self._obstacle = ""  # What was last logged, so that a poll each second does not fill the log.

    @property
    def spec(self) -> EncoderSpec | None:
        """See Encoder."""
        return self._spec

    @property
    def ready(self) -> bool:
        """See Encoder."""
        return self._ready

    async def refresh(self, timeout_s: float) -> bool:
        """See Encoder. Reading the spec each time costs two small calls and notices a new version by itself."""
        try:
            if not await self._client.is_model_ready(self._model, client_timeout=timeout_s):
                raise _unavailable(f"model {self._model} is not ready")
            spec = await self._read_spec(timeout_s)
        except (InferenceServerException, TriptychError, grpc.RpcError) as error:
            if str(error) != self._obstacle:
                log.warning("encoder at %s is not usable: %s", self._address, error)
            self._ready, self._obstacle = False, str(error)
            return False
        if spec != self._spec or not self._ready:
            log.info("encoder at %s is ready: %s version %s", self._address, self._model, spec.version)
        self._spec, self._ready, self._obstacle = spec, True, ""
        return True

    async def encode(self, pixels: Pixels, timeout_s: float, trace: Context | None = None) -> Features:
        """See Encoder."""
        spec = self._spec
        if spec is None:
            raise _unavailable(f"{self._address} has not been reached yet")
        batch = InferInput(_INPUT, [1, *pixels.shape], "FP32")
        batch.set_data_from_numpy(pixels[np.newaxis])
        try:
            result = await self._client.infer(
                self._model,
                [batch],
                outputs=[InferRequestedOutput(_OUTPUT)],
                client_timeout=timeout_s,
                **trace_arguments(trace),
            )
        except InferenceServerException as error:
            raise _from_triton(error, timeout_s) from None
        return _checked(result.as_numpy(_OUTPUT), spec.token_count(pixels.shape[-1]), spec.hidden_size)

    async def close(self) -> None:
        """See Encoder."""
        await self._client.close()

    async def _read_spec(self, timeout_s: float) -> EncoderSpec:
        metadata = await self._client.get_model_metadata(self._model, client_timeout=timeout_s)
        response = await self._client.get_model_config(self._model, client_timeout=timeout_s)
        parameters = response.config.parameters
        if PARAMETER not in parameters:
            raise misconfigured("it is missing")
        version = max(metadata.versions, key=lambda name: int(name) if name.isdigit() else -1, default="")
        return parse_encoder_spec(parameters[PARAMETER].string_value, version)


def _checked(features: Any, tokens: int, hidden_size: int) -> Features:
    """Returns one image's features after making sure that they are what the spec promises.

    An empty output without an error is what a numpy that does not fit Triton's Python backend gives.
    """
    if features is None or features.shape != (1, tokens, hidden_size) or features.dtype != np.float32:
        shape = None if features is None else (*features.shape, str(features.dtype))
        raise TriptychError(
            f"the encoder returned {shape} where (1, {tokens}, {hidden_size}, 'float32') was expected",
            reason="ENCODER_FAILED",
        )
    if not np.isfinite(features).all():
        raise TriptychError("the encoder returned features that are not finite", reason="ENCODER_FAILED")
    checked: Features = features[0]
    return checked


def _from_triton(error: InferenceServerException, timeout_s: float) -> TriptychError:
    code, message = str(error.status()), str(error.message())
    if code == "StatusCode.DEADLINE_EXCEEDED" or "timeout expired" in message:
        return encode_timeout(timeout_s)
    # Triton says UNAVAILABLE for a full queue, too.
    if code == "StatusCode.RESOURCE_EXHAUSTED" or "maximum queue size" in message:
        return Overloaded("the encoder's queue is full; try again later", reason="ENCODER_OVERLOADED")
    gone = ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED", "StatusCode.UNKNOWN", "StatusCode.NOT_FOUND")
    if code in gone or "not healthy" in message:
        return _unavailable(message)
    return TriptychError(f"the encoder failed: {message}", reason="ENCODER_FAILED")


def encode_timeout(timeout_s: float) -> StageTimeout:
    """Returns the error for an encode that missed its deadline."""
    return StageTimeout(
        f"encoding took longer than {timeout_s:.3g} s (encode_timeout_s, or what the call's own deadline left of it)",
        reason="ENCODE_TIMEOUT",
    )


def _unavailable(why: str) -> Unavailable:
    return Unavailable(f"the vision encoder does not answer: {why}", reason="ENCODER_UNAVAILABLE")
