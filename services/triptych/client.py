"""A small typed client over the stubs, blocking and asyncio.

    from pathlib import Path
    from triptych.client import Client

    with Client("127.0.0.1:50051") as client:
        answer = client.ask(Path("photo.jpg"), "what is in the picture?")
        print(answer.text, answer.usage.visual_tokens)

Errors are those of `triptych.errors`.
"""

from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import grpc

from triptych.errors import InvalidRequest
from triptych.rpc.channel import open_channel, open_sync_channel
from triptych.rpc.status import from_rpc_error
from triptych.telemetry.tracing import inject
from triptych.v1 import generation_pb2 as generation
from triptych.v1 import inference_pb2 as inference
from triptych.v1.inference_pb2_grpc import InferenceServiceStub
from triptych.vision.reduction_spec import parse_reduction, to_message
from triptych.visual_kv import VisualKvPolicy

PartLike = str | bytes | Path
"""A piece of a message: text, an encoded image, or the path of an image file."""

Detail = Literal["high", "medium", "low", "thumbnail"]
PriorityName = Literal["interactive", "standard", "economy"]

_DRAFT_MODES = {
    None: inference.DRAFT_MODE_UNSPECIFIED,
    False: inference.DRAFT_MODE_OFF,
    True: inference.DRAFT_MODE_ON,
}

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class Options:
    """How to answer; the defaults are the service's own (greedy).

    Attributes:
        max_tokens: Most tokens to generate; 0 is the worker's default.
        temperature: 0 is greedy.
        top_k: 0 keeps all tokens.
        top_p: In (0, 1].
        repetition_penalty: 1 changes nothing.
        seed: Makes sampling repeatable.
        stop: Strings that end the answer and are not part of it.
        ignore_eos: Generates until `max_tokens`; for measurements.
        priority: Scheduling class.
        cache_salt: Separates tenants in every cache.
        reduce: Fewer visual tokens of each image: `none`, `kmeans:N` or `merge:N`; None is the service's default.
        draft: Whether to begin with a draft encoder's features; None is the service's default.
        draft_threshold: Least similarity at which they are kept, in (0, 1]; None is the service's default.
        early_text: Whether text may come before they are checked; a `retracted` event then takes wrong text back.
        visual_kv: Where the images' KV lives while the answer is generated; None: as the worker is set up.
        degrade: Whether a text-only answer is better than an error when the encoder is late.
        request_id: Name for logs and traces; empty: the router makes one.
        timeout_s: The call's deadline; None waits for ever.
    """

    max_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    priority: PriorityName = "standard"
    cache_salt: str = ""
    reduce: str | None = None
    draft: bool | None = None
    draft_threshold: float | None = None
    early_text: bool = False
    visual_kv: VisualKvPolicy | None = None
    degrade: bool = True
    request_id: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished generation: its text, and the first and last event as the service sent them."""

    text: str
    started: inference.Started
    finished: inference.Finished

    @property
    def usage(self) -> generation.Usage:
        """Token counts."""
        return self.finished.usage

    @property
    def finish_reason(self) -> str:
        """`end`, `stop` or `length`."""
        return generation.FinishReason.Name(self.finished.finish_reason).removeprefix("FINISH_REASON_").lower()

    @property
    def stages(self) -> dict[str, float]:
        """Seconds per stage, for the stages that happened."""
        return {field.name: value.ToNanoseconds() / 1e9 for field, value in self.finished.durations.ListFields()}


def user(*parts: PartLike, detail: Detail = "high") -> inference.Message:
    """Returns a user's turn of text and images in the given order.

    Raises InvalidRequest (IMAGE_UNREADABLE) when an image file cannot be read.
    """
    return inference.Message(role=inference.ROLE_USER, parts=[_part(part, detail) for part in parts])


def assistant(text: str) -> inference.Message:
    """Returns an earlier answer as a turn."""
    return inference.Message(role=inference.ROLE_ASSISTANT, parts=[inference.Part(text=text)])


def system(text: str) -> inference.Message:
    """Returns instructions to the model as a turn."""
    return inference.Message(role=inference.ROLE_SYSTEM, parts=[inference.Part(text=text)])


def build_request(messages: Sequence[inference.Message], options: Options) -> inference.GenerateRequest:
    """Returns the request for a dialogue. Raises InvalidRequest (REDUCTION_INVALID)."""
    policy = inference.DEGRADATION_POLICY_ALLOW if options.degrade else inference.DEGRADATION_POLICY_FORBID
    return inference.GenerateRequest(
        request_id=options.request_id,
        messages=messages,
        sampling=generation.SamplingParameters(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
        ),
        stopping=generation.StoppingParameters(
            max_tokens=options.max_tokens, stop=options.stop, ignore_eos=options.ignore_eos
        ),
        priority=generation.Priority.Value(f"PRIORITY_{options.priority.upper()}"),
        cache_salt=options.cache_salt,
        degradation_policy=policy,
        reduction=None if options.reduce is None else to_message(parse_reduction(options.reduce)),
        draft=inference.DraftOptions(
            mode=_DRAFT_MODES[options.draft], threshold=options.draft_threshold, early_text=options.early_text
        ),
        visual_kv=options.visual_kv.proto if options.visual_kv else generation.VISUAL_KV_POLICY_UNSPECIFIED,
    )


class Client:
    """Blocking client of one router. Safe to use from several threads; close it, or use it as a context manager."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self._channel = open_sync_channel(address)
        self._stub = InferenceServiceStub(self._channel)

    def stream(
        self, messages: Sequence[inference.Message], options: Options = Options()
    ) -> Generator[inference.GenerateResponse, None, None]:
        """Yields a generation's events as they arrive; leaving the loop early cancels the request."""
        call = self._stub.Generate(build_request(messages, options), timeout=options.timeout_s, metadata=inject())
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    def chat(self, messages: Sequence[inference.Message], options: Options = Options()) -> Answer:
        """Returns the answer to a dialogue once it is complete."""
        collector = _Collector()
        for event in self.stream(messages, options):
            collector.add(event)
        return collector.answer()

    def ask(self, *parts: PartLike, detail: Detail = "high", options: Options = Options()) -> Answer:
        """Returns the answer to one question: text and images in order."""
        return self.chat([user(*parts, detail=detail)], options)

    def model(self, timeout_s: float | None = 10.0) -> inference.Model:
        """Describes the served model."""
        try:
            return self._stub.GetModel(inference.GetModelRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def close(self) -> None:
        """Closes the connection; calls in progress are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Asyncio client of one router; create and use it in one event loop."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        self._channel = open_channel(address)
        self._stub = InferenceServiceStub(self._channel)

    async def stream(
        self, messages: Sequence[inference.Message], options: Options = Options()
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        """Yields a generation's events as they arrive; closing the iterator cancels the request."""
        call = self._stub.Generate(build_request(messages, options), timeout=options.timeout_s, metadata=inject())
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def chat(self, messages: Sequence[inference.Message], options: Options = Options()) -> Answer:
        """Returns the answer to a dialogue once it is complete."""
        collector = _Collector()
        async for event in self.stream(messages, options):
            collector.add(event)
        return collector.answer()

    async def ask(self, *parts: PartLike, detail: Detail = "high", options: Options = Options()) -> Answer:
        """Returns the answer to one question: text and images in order."""
        return await self.chat([user(*parts, detail=detail)], options)

    async def model(self, timeout_s: float | None = 10.0) -> inference.Model:
        """Describes the served model."""
        try:
            return await self._stub.GetModel(inference.GetModelRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def close(self) -> None:
        """Closes the connection; calls in progress are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Collector:
    """Gathers a stream's events into an Answer."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._started = inference.Started()
        self._finished = inference.Finished()

    def add(self, event: inference.GenerateResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "chunk":
            self._pieces.append(event.chunk.text)
        elif kind == "retracted":
            self._pieces.clear()
        elif kind == "started":
            self._started = event.started
        elif kind == "finished":
            self._finished = event.finished

    def answer(self) -> Answer:
        return Answer("".join(self._pieces), self._started, self._finished)


def _part(part: PartLike, detail: Detail) -> inference.Part:
    if isinstance(part, str):
        return inference.Part(text=part)
    wanted = inference.ImageDetail.Value(f"IMAGE_DETAIL_{detail.upper()}")
    return inference.Part(image=inference.Image(data=_image_bytes(part), detail=wanted))


def _image_bytes(image: bytes | Path) -> bytes:
    if isinstance(image, bytes):
        return image
    try:
        return image.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot read image {image}: {error.strerror}", reason="IMAGE_UNREADABLE") from None
