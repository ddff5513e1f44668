"""Every error path: its status, its body, and its line in the documentation."""

import re

import pytest

from tests.gateway.conftest import Rig
from tests.gateway.error_cases import CASES, DOCUMENT, HEAD, Case, observe
from triptych.gateway import errors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.cause)
async def test_an_error_has_openais_shape_and_is_documented_as_it_is(case: Case) -> None:
    seen = await observe(case)
    assert set(seen.error) == {"message", "type", "param", "code"}
    assert seen.error["code"] == case.code
    assert seen.status == ("200, then an event" if case.in_stream else str(case.status))
    assert seen.row(case.cause) in DOCUMENT.read_text().splitlines(), "run `python -m tests.gateway.error_cases`"


def test_the_document_holds_nothing_else() -> None:
    rows = DOCUMENT.read_text().removeprefix(HEAD).splitlines()
    assert len(rows) == len(CASES)


def test_every_status_the_openapi_document_promises_has_a_case() -> None:
    assert {400, 401, 404, 408, 413, 429, 500, 503, 504} <= {case.status for case in CASES}


@pytest.mark.parametrize("cause", ["too many requests behind it", "no worker"])
async def test_what_may_pass_by_itself_says_when_to_try_again(rig: Rig, cause: str) -> None:
    case = next(case for case in CASES if case.cause == cause)
    case.prepare(rig.router)
    response = await case.send(rig)
    assert int(response.headers["retry-after"]) == errors.RETRY_AFTER_S


async def test_a_fault_of_the_gateway_itself_tells_its_kind_and_nothing_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("secret words of the prompt")

    monkeypatch.setattr("triptych.gateway.translate.chat_requests", fail)
    response = await rig.chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal"
    assert "ZeroDivisionError" in response.text and "secret" not in response.text
    monkeypatch.undo()
    assert (await rig.chat()).status_code == 200


async def test_a_client_that_leaves_is_counted_and_its_work_is_cancelled(rig: Rig) -> None:
    import asyncio

    rig.router.before_started = lambda: asyncio.sleep(60)
    waiting = asyncio.create_task(rig.chat())
    while not rig.router.running:
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(2):
        while rig.router.running:
            await asyncio.sleep(0.01)
    assert rig.router.cancelled == 1
    metrics = (await rig.http.get("/metrics")).text
    assert re.search(r'mm_http_requests_total\{route="/v1/chat/completions",status="499"\} 1\.0', metrics)
