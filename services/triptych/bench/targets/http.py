"""Any OpenAI-compatible server: chat completions, streamed."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp

from triptych.bench.targets.dialects import Dialect, dialect_of, length_fields
from triptych.bench.targets.sse import SseParser
from triptych.bench.targets.target import Piece, RequestFailed, Usage
from triptych.bench.workload import Ask, Message
from triptych.errors import Unavailable

PREPARE_TIMEOUT_S = 10.0
KEEPALIVE_S = 1.0
"""How long an idle connection is used again: less than any server keeps it, or a request would meet its closing."""

_JPEG = b"\xff\xd8"


class HttpTarget:
    """An OpenAI-compatible server at `url` (with its `/v1`).

    Every request may have a connection of its own; connections are kept and used again, unless
    `keep_connections` is false (llama.cpp's server closes some after an answer, unannounced). Proxies of the
    environment are not used.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        model: str = "",
        dialect: Dialect = "auto",
        api_key: str = "",
        extra_body: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        keep_connections: bool = True,
    ) -> None:
        self.name = name or url
        self.model = model
        self._url = url.rstrip("/")
        self._dialect = dialect
        self._keep_connections = keep_connections
        self._extra_body = dict(extra_body or {})
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def prepare(self) -> None:
        """Asks for the list of models, whose first is used unless one was named. Raises Unavailable."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
                if self._keep_connections
                else aiohttp.TCPConnector(limit=0, force_close=True),
                headers=self._headers,
            )
        try:
            timeout = aiohttp.ClientTimeout(total=PREPARE_TIMEOUT_S)
            async with self._session.get(f"{self._url}/models", timeout=timeout) as response:
                response.raise_for_status()
                models = (await response.json(content_type=None))["data"]
                first = next((model for model in models if model["id"] == self.model), models[0])
                owner = str(first.get("owned_by", ""))
                self.model = self.model or str(first["id"])
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
            raise Unavailable(
                f"no OpenAI-compatible server answers at {self._url}/models ({_kind_of(error)})"
            ) from None
        if self._dialect == "auto":
            self._dialect = dialect_of(owner)

    async def stream(self, ask: Ask) -> AsyncGenerator[Piece | Usage, None]:
        """See Target."""
        if self._session is None:
            raise RuntimeError("stream() before prepare()")
        body = request_body(ask, self.model, self._dialect, self._extra_body)
        finished = False
        parser = SseParser()
        try:
            async with self._session.post(
                f"{self._url}/chat/completions", json=body, timeout=self._timeout
            ) as response:
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}")
                async for received in response.content.iter_any():
                    for data in parser.feed(received):
                        if data == b"[DONE]":
                            finished = True
                            continue
                        event = _read(data)
                        finished = finished or _is_last(event)
                        for item in _items_of(event):
                            yield item
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise RequestFailed(_kind_of(error)) from None
        if not finished:
            raise RequestFailed("stream ended early")

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def request_body(ask: Ask, model: str, dialect: Dialect, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of a greedy, streamed chat completion; `extra` wins over what is set here."""
    return {
        "model": model,
        "messages": [_message(message) for message in ask.messages],
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **length_fields(dialect, ask.max_tokens),
        **extra,
    }


def _message(message: Message) -> dict[str, Any]:
    if not message.pictures:
        return {"role": message.role, "content": message.text}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in message.pictures
    ]
    return {"role": message.role, "content": [*parts, {"type": "text", "text": message.text}]}


def data_url(picture: bytes) -> str:
    """Returns a JPEG or PNG as a `data:` URL."""
    kind = "jpeg" if picture.startswith(_JPEG) else "png"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode('ascii')}"


def _read(data: bytes) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise RequestFailed("malformed event") from None
    if not isinstance(event, dict):
        raise RequestFailed("malformed event")
    if "error" in event:
        error = event["error"]
        code = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
        raise RequestFailed(f"error in the stream: {code or 'unnamed'}")
    return event


def _is_last(event: dict[str, Any]) -> bool:
    return any(choice.get("finish_reason") for choice in event.get("choices") or ())


def _items_of(event: dict[str, Any]) -> list[Piece | Usage]:
    items: list[Piece | Usage] = []
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        # Reasoning models stream their thoughts in a field of their own; they are tokens all the same.
        text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if text:
            items.append(Piece(text))
    if usage := event.get("usage"):
        items.append(Usage(usage.get("prompt_tokens"), int(usage.get("completion_tokens") or 0)))
    return items


def _kind_of(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return f"HTTP {error.status}"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connection refused"
    if isinstance(error, aiohttp.ClientError):
        return "connection lost"
    return type(error).__name__
