"""Every way a request to the gateway can fail, and the table of what the client then sees.

`python -m tests.gateway.error_cases` writes docs/api-errors.md; test_errors.py fails when it is out of date.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.gateway.conftest import Rig, running_rig
from tests.gateway.fakes import MODEL, FakeRouter, lost
from triptych import errors

DOCUMENT = Path(__file__).parents[2] / "docs" / "api-errors.md"

HEAD = """# Errors of the HTTP API

Every failure has OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`. `code` is for programs: where the
router or a stage behind it refused, it is the reason of [errors.md](errors.md) in lower case. 429 and 503 bear
`Retry-After`. A stream that has begun ends with the error as its last event, without `[DONE]`. When the client leaves,
the work is cancelled and counted under status 499.

This table is written by `python -m tests.gateway.error_cases` from what a gateway really answered.

| cause | status | type | code | param | message |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client saw."""

    status: str
    error: dict[str, Any]

    def row(self, cause: str) -> str:
        """Returns a line of the table."""
        cells = [self.status, *(self.error[name] for name in ("type", "code", "param", "message"))]
        quoted = ["" if cell is None else str(cell).replace("|", "\\|") for cell in cells]
        kind, code, param, message = quoted[1:]
        return f"| {cause} | {quoted[0]} | `{kind}` | `{code}` | {f'`{param}`' if param else ''} | {message} |"


@dataclass(frozen=True, slots=True)
class Case:
    """One cause: how to set the stage, what to send, and what must come."""

    cause: str
    status: int
    code: str
    send: Callable[[Rig], Awaitable[httpx2.Response]]
    knobs: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[FakeRouter], None] = lambda router: None
    in_stream: bool = False


def chat(**members: Any) -> Callable[[Rig], Awaitable[httpx2.Response]]:
    return lambda rig: rig.chat(**members)


def complete(**members: Any) -> Callable[[Rig], Awaitable[httpx2.Response]]:
    body = {"model": MODEL, "prompt": "hello", **members}
    return lambda rig: rig.http.post("/v1/completions", json=body)


def picture(url: str) -> Callable[[Rig], Awaitable[httpx2.Response]]:
    return chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


def raw(content: bytes, kind: str = "application/json") -> Callable[[Rig], Awaitable[httpx2.Response]]:
    return lambda rig: rig.http.post("/v1/chat/completions", content=content, headers={"Content-Type": kind})


def refusing(error: errors.TriptychError) -> Callable[[FakeRouter], None]:
    def prepare(router: FakeRouter) -> None:
        router.refuse = error

    return prepare


def slow(router: FakeRouter) -> None:
    router.before_started = lambda: asyncio.sleep(60)


def breaking(router: FakeRouter) -> None:
    async def before_word(index: int) -> None:
        if index == 2:
            raise lost()

    router.before_word = before_word


def unfinished(piece: bytes) -> Callable[[Rig], Awaitable[httpx2.Response]]:
    """Sends the beginning of a body of unknown length and waits for the answer."""

    async def send(rig: Rig) -> httpx2.Response:
        url = httpx2.URL(rig.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
            f"Transfer-Encoding: chunked\r\n\r\n{len(piece):x}\r\n"
        )
        writer.write(head.encode() + piece + b"\r\n")
        reply = await reader.read()  # Up to the end: the gateway closes, because the rest of the body is unread.
        writer.close()
        status, _, rest = reply.partition(b"\r\n")
        return httpx2.Response(int(status.split()[1]), content=rest.partition(b"\r\n\r\n")[2])

    return send


async def one_too_many(rig: Rig) -> httpx2.Response:
    waiting = asyncio.create_task(rig.chat())
    while not rig.router.running:
        await asyncio.sleep(0.01)
    try:
        return await rig.chat()
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def one_body_too_many(rig: Rig) -> httpx2.Response:
    padding = " " * 700
    waiting = asyncio.create_task(rig.chat(user=padding))
    while not rig.router.running:
        await asyncio.sleep(0.01)
    try:
        return await rig.chat(user=padding)
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def with_wrong_key(rig: Rig) -> httpx2.Response:
    return await rig.chat(headers={"Authorization": "Bearer wrong"})


KEYS = {"api_keys": "right"}
NOWHERE = {"router": "127.0.0.1:1"}

# One cause a line, however long.
# ruff: noqa: E501
CASES = [
    Case("the body is not JSON", 400, "invalid_json", raw(b"{")),
    Case("the body is not sent as JSON", 400, "invalid_body", raw(b"{}", "text/plain")),
    Case("a member is missing", 400, "missing_required_parameter", lambda rig: rig.http.post("/v1/chat/completions", json={"model": MODEL})),
    Case("a member is of the wrong type", 400, "invalid_value", chat(max_tokens="8")),
    Case("a value is out of range", 400, "invalid_value", chat(temperature=3)),
    Case("a role is unknown", 400, "invalid_value", chat(messages=[{"role": "tool", "content": "hello"}])),
    Case("a member is unknown", 400, "unknown_parameter", chat(min_p=0.1)),
    Case("more answers than allowed", 400, "invalid_value", chat(n=9)),
    Case("`stream_options` without `stream`", 400, "invalid_value", chat(stream_options={"include_usage": True})),
    Case("tools", 400, "unsupported_parameter", chat(tools=[{"type": "function"}])),
    Case("a tool is demanded", 400, "unsupported_parameter", chat(tool_choice="required")),
    Case("JSON is demanded", 400, "unsupported_parameter", chat(response_format={"type": "json_schema", "json_schema": {}})),
    Case("a penalty", 400, "unsupported_parameter", chat(presence_penalty=0.5)),
    Case("a bias", 400, "unsupported_parameter", chat(logit_bias={"5": 1.0})),
    Case("sound is demanded", 400, "unsupported_parameter", chat(modalities=["text", "audio"])),
    Case("`top_logprobs` without `logprobs`", 400, "unsupported_parameter", chat(top_logprobs=2)),
    Case("`echo`", 400, "unsupported_parameter", complete(echo=True)),
    Case("`suffix`", 400, "unsupported_parameter", complete(suffix="bye")),
    Case("`best_of`", 400, "unsupported_parameter", complete(best_of=2)),
    Case("a prompt of token ids", 400, "invalid_value", complete(prompt=[1, 2])),
    Case("a picture by http", 400, "image_url_unsupported", picture("http://example.org/a.png")),
    Case("a picture by https, no host allowed", 400, "image_url_unsupported", picture("https://example.org/a.png")),
    Case("a picture from another host", 400, "image_url_unsupported", picture("https://example.org/a.png"), {"image_hosts": "pictures.invalid"}),
    Case("a picture cannot be fetched", 400, "image_fetch_failed", picture("https://pictures.invalid/a.png"), {"image_hosts": "*.invalid"}),
    Case("the picture is damaged", 400, "image_corrupt", chat(), {}, refusing(errors.InvalidImage("the image is cut off"))),
    Case("the prompt is too long", 400, "context_length_exceeded", chat(), {}, refusing(errors.InvalidRequest("2000 prompt tokens and max_tokens=256 exceed the limit of 2048 tokens", reason="PROMPT_TOO_LONG"))),
    Case("no key", 401, "invalid_api_key", chat(), KEYS),
    Case("a wrong key", 401, "invalid_api_key", with_wrong_key, KEYS),
    Case("an unknown model", 404, "model_not_found", chat(model="gpt-4o")),
    Case("an unknown URL", 404, "unknown_url", lambda rig: rig.http.get("/v1/engines")),
    Case("a wrong method", 405, "method_not_supported", lambda rig: rig.http.get("/v1/chat/completions")),
    Case("the body comes too slowly", 408, "body_timeout", unfinished(b"{"), {"body_timeout_s": 0.1}),
    Case("the answer takes longer than the request allows", 408, "stage_timeout", chat(triptych={"timeout_s": 0.2}), {}, slow),
    Case("the answer takes longer than the gateway allows", 408, "stage_timeout", chat(), {"request_timeout_s": 0.2}, slow),
    Case("the declared body is too large", 413, "request_too_large", raw(b" " * 2048), {"max_body_bytes": 1024}),
    Case("a body of unknown length is too large", 413, "request_too_large", unfinished(b" " * 4096), {"max_body_bytes": 1024}),
    Case("too many requests in the gateway", 429, "overloaded", one_too_many, {"max_inflight": 1}, slow),
    Case("too many bytes in the gateway", 429, "overloaded", one_body_too_many, {"max_inflight_body_bytes": 1024, "max_body_bytes": 1024}, slow),
    Case("too many requests behind it", 429, "overloaded", chat(), {}, refusing(errors.Overloaded("max_inflight=256 requests are in flight; try again later"))),
    Case("a fault behind the gateway", 500, "internal", chat(), {}, refusing(errors.TriptychError("internal error (KeyError); the service's log has the details"))),
    Case("no router", 503, "service_unavailable", chat(), NOWHERE),
    Case("no worker", 503, "worker_unavailable", chat(), {}, refusing(lost())),
    Case("the encoder is late and the request forbids degradation", 504, "encode_timeout", chat(triptych={"degrade": False}), {}, refusing(errors.StageTimeout("encoding took longer than encode_timeout_s=5", reason="ENCODE_TIMEOUT"))),
    Case("no first token in time", 504, "prefill_timeout", chat(), {}, refusing(errors.StageTimeout("no first token within 40 s", reason="PREFILL_TIMEOUT"))),
    Case("the worker is lost in a stream", 503, "worker_unavailable", chat(stream=True), {}, breaking, in_stream=True),
]  # fmt: skip


async def observe(case: Case) -> Seen:
    """Makes a case happen and returns what the client saw."""
    async with running_rig(case.knobs) as rig:
        case.prepare(rig.router)
        response = await case.send(rig)
        if not case.in_stream:
            return Seen(str(response.status_code), response.json()["error"])
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert response.status_code == 200 and "[DONE]" not in events
        return Seen("200, then an event", json.loads(events[-1])["error"])


async def write() -> None:
    """Writes the document."""
    rows = [(await observe(case)).row(case.cause) for case in CASES]
    DOCUMENT.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    asyncio.run(write())
