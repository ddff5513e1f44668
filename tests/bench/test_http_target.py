"""The HTTP client against a real server, the misbehaving kinds included."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.bench.servers import OpenAiServer, event, piece, serving
from triptych.bench.driver import run_round
from triptych.bench.pacing import Concurrency
from triptych.bench.recorder import Record
from triptych.bench.targets.dialects import Dialect, length_fields
from triptych.bench.targets.http import HttpTarget
from triptych.bench.targets.target import Piece, Usage
from triptych.bench.workload import Ask, Conversation, Message, Turn
from triptych.errors import Unavailable

ASK = Ask((Message("user", "hello"),), 3)


@asynccontextmanager
async def prepared(server: OpenAiServer, **arguments: object) -> AsyncIterator[HttpTarget]:
    async with serving(server):
        target = HttpTarget(server.url, **arguments)  # type: ignore[arg-type]
        await target.prepare()
        try:
            yield target
        finally:
            await target.close()


async def one_record(target: HttpTarget) -> Record:
    """Returns the record of one request."""
    outcome = await run_round(target, [(Conversation("text", (Turn("hello"),)),)], Concurrency(1), 3)
    (record,) = outcome.records
    return record


async def test_pieces_and_usage_arrive_in_order_and_the_empty_role_event_is_no_token() -> None:
    async with prepared(OpenAiServer()) as target:
        items = [item async for item in target.stream(ASK)]
    assert items == [Piece("a "), Piece("b "), Piece("c "), Usage(7, 3)]
    assert target.model == "toy"


async def test_a_server_without_usage_has_its_pieces_counted() -> None:
    async with prepared(OpenAiServer(with_usage=False)) as target:
        record = await one_record(target)
    assert not record.error and not record.counted and record.output_tokens == 3


async def test_pictures_go_before_the_text_as_data_urls() -> None:
    server = OpenAiServer()
    ask = Ask((Message("user", "what?", (b"\xff\xd8jpeg", b"\x89PNG")), Message("assistant", "that")), 3)
    async with prepared(server, extra_body={"temperature": 1}) as target:
        _ = [item async for item in target.stream(ask)]
    (body,) = server.bodies
    first, second, text = body["messages"][0]["content"]
    assert first["image_url"]["url"] == "data:image/jpeg;base64," + base64.b64encode(b"\xff\xd8jpeg").decode()
    assert second["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "what?"}
    assert body["messages"][1] == {"role": "assistant", "content": "that"}
    assert body["temperature"] == 1 and body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(("owner", "dialect"), [("vllm", "vllm"), ("triptych", "triptych"), ("somebody", "openai")])
async def test_the_owner_of_the_model_decides_how_length_is_fixed(owner: str, dialect: Dialect) -> None:
    server = OpenAiServer(owner=owner)
    async with prepared(server) as target:
        _ = [item async for item in target.stream(ASK)]
    expected = length_fields(dialect, 3)
    assert {name: server.bodies[0].get(name) for name in expected} == expected
    assert ("ignore_eos" in server.bodies[0]) == (dialect == "vllm")


async def test_the_key_goes_into_the_authorization_header() -> None:
    server = OpenAiServer()
    async with prepared(server, api_key="k") as target:
        _ = [item async for item in target.stream(ASK)]
    assert server.headers[0]["Authorization"] == "Bearer k"


async def test_a_refusal_is_counted_by_its_status() -> None:
    async with prepared(OpenAiServer(status=429)) as target:
        assert (await one_record(target)).error == "HTTP 429"


async def test_a_slow_server_is_measured_slow() -> None:
    async with prepared(OpenAiServer(delay_s=0.05)) as target:
        record = await one_record(target)
    assert record.ttft_s is not None and record.tpot_s is not None
    assert record.ttft_s >= 0.05 and record.tpot_s >= 0.05
    assert len(record.itl_s) == 2 and min(record.itl_s) >= 0.03


async def test_a_server_that_takes_too_long_times_out() -> None:
    async def hang(response: web.StreamResponse) -> None:
        await response.write(piece("a"))
        await asyncio.sleep(5)

    async with prepared(OpenAiServer(behave=hang), timeout_s=0.2) as target:
        record = await one_record(target)
    assert record.error == "timeout" and len(record.pieces_s) == 1


async def test_a_lost_connection_is_an_error_even_after_tokens() -> None:
    async def vanish(response: web.StreamResponse) -> None:
        await response.write(piece("a"))
        assert response._req is not None and response._req.transport is not None
        response._req.transport.abort()

    async with prepared(OpenAiServer(behave=vanish)) as target:
        assert (await one_record(target)).error == "connection lost"


async def test_a_stream_that_ends_without_a_finish_is_an_error() -> None:
    async def stop_early(response: web.StreamResponse) -> None:
        await response.write(piece("a"))

    async with prepared(OpenAiServer(behave=stop_early)) as target:
        assert (await one_record(target)).error == "stream ended early"


async def test_an_error_inside_the_stream_is_named() -> None:
    async def fail(response: web.StreamResponse) -> None:
        await response.write(piece("a") + event(error={"message": "secret", "code": "overloaded"}))

    async with prepared(OpenAiServer(behave=fail)) as target:
        assert (await one_record(target)).error == "error in the stream: overloaded"


async def test_what_is_not_json_is_an_error() -> None:
    async def babble(response: web.StreamResponse) -> None:
        await response.write(b"data: {half\n\n")

    async with prepared(OpenAiServer(behave=babble)) as target:
        assert (await one_record(target)).error == "malformed event"


async def test_leaving_early_ends_the_request_at_the_server() -> None:
    server = OpenAiServer(words=["x"] * 200, delay_s=0.02)
    async with prepared(server) as target:
        stream = target.stream(ASK)
        assert await anext(stream) == Piece("x")
        await stream.aclose()
        async with asyncio.timeout(5):
            while server.running:
                await asyncio.sleep(0.01)


async def test_an_address_where_nobody_listens_is_said_at_once() -> None:
    target = HttpTarget("http://127.0.0.1:1/v1")
    with pytest.raises(Unavailable, match="connection refused"):
        await target.prepare()
    await target.close()


async def test_connections_are_kept_unless_told_otherwise() -> None:
    async with serving(OpenAiServer()) as server:
        for keep in (True, False):
            target = HttpTarget(server.url, keep_connections=keep)
            await target.prepare()
            async for _ in target.stream(ASK):
                pass
            await target.close()
    assert [headers.get("Connection") for headers in server.headers] == [None, "close"]
