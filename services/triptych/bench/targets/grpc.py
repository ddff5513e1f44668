"""Our router over gRPC, without a gateway."""

from collections.abc import AsyncGenerator

from triptych import client
from triptych.bench.targets.target import Piece, RequestFailed, Usage
from triptych.bench.workload import Ask, Message
from triptych.errors import TriptychError, Unavailable
from triptych.v1 import inference_pb2


class GrpcTarget:
    """A router at `address` (host:port). One channel carries all requests."""

    def __init__(self, address: str, *, name: str = "", timeout_s: float = 600.0) -> None:
        self.name = name or f"grpc://{address}"
        self.model = ""
        self._address = address
        self._timeout_s = timeout_s
        self._client: client.AsyncClient | None = None

    async def prepare(self) -> None:
        """Asks which model is served. Raises Unavailable."""
        if self._client is None:
            self._client = client.AsyncClient(self._address)
        try:
            self.model = (await self._client.model()).name
        except TriptychError as error:
            raise Unavailable(f"the router at {self._address} does not serve: {error.message}") from None

    async def stream(self, ask: Ask) -> AsyncGenerator[Piece | Usage, None]:
        """See Target. Degraded answers are failures: they are not what was asked for."""
        if self._client is None:
            raise RuntimeError("stream() before prepare()")
        options = client.Options(max_tokens=ask.max_tokens, ignore_eos=True, degrade=False, timeout_s=self._timeout_s)
        finished = False
        try:
            async for event in self._client.stream([_message(message) for message in ask.messages], options):
                kind = event.WhichOneof("event")
                if kind == "chunk":
                    yield Piece(event.chunk.text, event.chunk.token_count)
                elif kind == "finished":
                    finished = True
                    usage = event.finished.usage
                    yield Usage(usage.text_tokens + usage.visual_tokens, usage.output_tokens)
        except TriptychError as error:
            raise RequestFailed(error.reason) from None
        if not finished:
            raise RequestFailed("stream ended early")

    async def close(self) -> None:
        """Closes the channel."""
        if self._client is not None:
            await self._client.close()
            self._client = None


def _message(message: Message) -> inference_pb2.Message:
    if message.role == "assistant":
        return client.assistant(message.text)
    return client.user(*message.pictures, message.text)
