"""The page on the real stack: gateway, router, Triton, worker, and a real Chromium."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from tests.gateway_page.browser import Page
from tests.gateway_page.test_report import facts, rows
from tests.stack.conftest import Up, load_of, wait_idle
from triptych.gateway.page import SystemView

pytestmark = pytest.mark.integration

Picture = tuple[str, str, str]


@pytest.fixture
def page(chromium: webdriver.Chrome, served: Up) -> Iterator[Page]:
    page = Page(chromium, served.http.replace("127.0.0.1", "localhost"))
    page.emulate()
    page.open()
    yield page
    assert page.console_errors() == []
    assert page.foreign_requests() == []


def wait_for_reports(page: Page, count: int) -> None:
    page.wait(lambda: len(page.find_all(".report")) == count, f"{count} reports")


def test_a_picture_is_answered_and_the_second_question_finds_it_in_the_kv_cache(page: Page, picture: Picture) -> None:
    page.give("drop", [picture])
    # KV is kept in whole blocks: question and answer must fill the one in which the picture ends.
    page.ask("what can you see in the middle of the picture?")
    wait_for_reports(page, 1)
    assert page.answers()[0]
    assert {"intake", "preprocess", "queue", "prefill"} <= rows(page).keys()
    assert "visual +" in facts(page)["Prompt"]
    page.ask("what colour is it?")
    wait_for_reports(page, 2)
    assert facts(page)["Picture"].startswith("found in the worker’s KV cache")
    assert page.find_all(".skipped")[-1].text == "not needed: cached"
    assert page.find("#from-kv_cache").text != "0"


def test_less_detail_takes_fewer_tokens(page: Page, picture: Picture) -> None:
    page.find("#show-settings").click()
    page.find("#detail").send_keys("thumb")
    page.button("Done").click()
    page.find("#question").click()
    page.give("drop", [picture])
    page.ask("where is the star?")
    wait_for_reports(page, 1)
    tokens = page.find("#detail option[value=thumbnail]").get_attribute("text")
    seen = facts(page)["Picture"].rsplit(" as ")[-1]
    assert str(tokens).endswith(seen)


def test_stop_frees_the_worker(page: Page, served: Up, picture: Picture) -> None:
    # Eight long answers at once last several seconds: one is over before the key is pressed on a fast machine.
    page.driver.execute_script(
        "const real = fetch; window.fetch = (url, options) => {"
        "  if (options?.method !== 'POST') return real(url, options);"
        "  const body = JSON.parse(options.body); body.triptych.ignore_eos = true;"
        "  Object.assign(body, { max_completion_tokens: 1500, n: 8 });"
        "  return real(url, { ...options, body: JSON.stringify(body) }); }"
    )
    page.give("drop", [picture])
    page.ask("where is the star?")
    page.wait(lambda: page.answers()[-1:] not in ([], [""]), "the first word")
    page.press(Keys.ESCAPE)
    page.wait(lambda: page.find_all(".note"), "the end")
    stopped_s = time.monotonic()
    asyncio.run(wait_idle(served.worker))
    assert time.monotonic() - stopped_s < 3
    assert page.find(".note").text.startswith("Stopped")


def test_a_damaged_picture_is_refused_in_words(page: Page) -> None:
    page.expected_errors.append("Failed to load resource")
    page.give("drop", [("torn.png", "image/png", "iVBORw0KGgoAAAANSUhEUgAAAcA=")])
    page.ask("what is this?")
    page.wait(lambda: page.find_all(".failure"), "the refusal")
    title, *_, advice, _ = page.find(".failure").text.splitlines()
    assert title == "The request was refused"
    assert advice in (
        "Open the picture, save it again, and send that.",
        "Send a JPEG, PNG, WebP, BMP, TIFF or unanimated GIF.",
    )


def test_the_live_view_shows_the_worker(page: Page, served: Up) -> None:
    page.wait(lambda: page.find("#system-state").text == "Ready: pictures and text are answered.", "readiness")
    load = asyncio.run(load_of(served.worker))
    assert page.find("#kv-free").text.endswith(f"of {load.total_blocks:,}")


async def test_a_system_that_is_down_is_seen_as_down_within_two_seconds() -> None:
    view = SystemView(router="127.0.0.1:1", worker="127.0.0.1:1", in_flight=lambda: 5)
    started_s = time.monotonic()
    state, model = await asyncio.gather(view.state(), view.model())
    assert time.monotonic() - started_s < 2
    assert (state.ready, state.worker, state.worker_known, state.in_flight) == (False, None, True, 5)
    assert model is None
    await view.close()


async def test_the_view_reads_model_and_load_of_running_services(served: Up) -> None:
    view = SystemView(served.router, served.worker, in_flight=lambda: 0)
    model, state = await view.model(), await view.state()
    assert model is not None
    assert model.max_images >= 1
    assert state.ready
    assert state.worker is not None
    assert state.worker.total_blocks >= state.worker.used_blocks + state.worker.cached_blocks
    assert await view.state() is state
    await view.close()
