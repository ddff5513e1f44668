"""What an answer cost, in bars and in words; and the live view."""

from dataclasses import replace

import pytest
from selenium.webdriver.common.by import By

from tests.gateway_page.browser import Page
from tests.gateway_page.stub import JAEGER, REPORT, Scripted, StubGateway


def facts(page: Page) -> dict[str, str]:
    """Returns the newest report's facts."""
    report = page.find_all(".report")[-1]
    names = [item.text for item in report.find_elements(By.TAG_NAME, "dt")]
    return dict(zip(names, [item.text for item in report.find_elements(By.TAG_NAME, "dd")], strict=True))


def rows(page: Page) -> dict[str, str]:
    """Returns the newest waterfall's stages with their times."""
    table = page.find_all(".waterfall")[-1]
    return {
        row.find_element(By.TAG_NAME, "th").text: row.find_element(By.CSS_SELECTOR, ".number").text
        for row in table.find_elements(By.CSS_SELECTOR, "tbody tr")
    }


def edges(page: Page, stage: str) -> tuple[float, float]:
    """Returns where a stage's bar begins and ends, in milliseconds on the axis."""
    left, width = page.driver.execute_script(
        "const bar = [...document.querySelectorAll(`.span.${arguments[0]}`)].at(-1).style;"
        "return [parseFloat(bar.left), parseFloat(bar.width)]",
        stage,
    )
    total_ms = REPORT["timings"]["total"] * 10
    return left * total_ms, (left + width) * total_ms


def test_the_waterfall_shows_every_stage_on_one_time_axis(page: Page) -> None:
    page.ask("go")
    page.wait_for_answer("in the middle")
    assert page.find(".report summary").text == "First token after 73.3 ms, all after 110 ms"
    assert rows(page) == {
        "intake": "1.2 ms",
        "preprocess": "6.3 ms",
        "encode": "42.1 ms",
        "queue": "3.1 ms",
        "prefill": "18.2 ms",
        "decode": "35.4 ms",
    }
    assert edges(page, "encode") == pytest.approx((7.5, 49.6), abs=0.2)
    assert edges(page, "prefill") == pytest.approx((55.1, 73.3), abs=0.2)
    assert edges(page, "decode") == pytest.approx((73.3, 108.7), abs=0.2)
    assert [tick.text for tick in page.find_all(".axis span")] == ["0", "50 ms", "100 ms"]


def test_tokens_and_the_way_of_each_picture_are_told_in_words(page: Page, stub: StubGateway) -> None:
    images = [{**REPORT["images"][0], "source": source} for source in ("kv_cache", "encoder_cache", "encoder")]
    usage = {"text_tokens": 14, "visual_tokens": 192, "cached_tokens": 80, "output_tokens": 1}
    stub.answers.append(Scripted(report={**REPORT, "images": images, "usage": usage}))
    page.ask("go")
    page.wait_for_answer("in the middle")
    assert facts(page) == {
        "Prompt": "192 visual + 14 text tokens, 80 of them cached",
        "Answer": "1 token",
        "Picture 1": "found in the worker’s KV cache; seen at 112 × 112 px as 64 tokens",
        "Picture 2": "found in the encoder cache; seen at 112 × 112 px as 64 tokens",
        "Picture 3": "encoded now; seen at 112 × 112 px as 64 tokens",
        "Trace": "open in Jaeger",
    }
    assert [page.find(f"#from-{source}").text for source in ("kv_cache", "encoder_cache", "encoder")] == ["1"] * 3


def test_a_cached_picture_shows_that_encoding_was_not_needed(page: Page, stub: StubGateway) -> None:
    timings = {name: seconds for name, seconds in REPORT["timings"].items() if name != "encode"}
    images = [{**REPORT["images"][0], "source": "kv_cache"}]
    stub.answers.append(Scripted(report={**REPORT, "images": images, "timings": timings}))
    page.ask("go")
    page.wait_for_answer("in the middle")
    assert list(rows(page)) == ["intake", "preprocess", "encode", "queue", "prefill", "decode"]
    assert page.find(".skipped").text == "not needed: cached"


def test_an_answer_about_text_has_no_encoding_at_all(page: Page, stub: StubGateway) -> None:
    timings = {"intake": 0.0001, "queue": 0.001, "prefill": 0.01, "time_to_first_token": 0.012, "total": 0.0125}
    stub.answers.append(Scripted(report={**REPORT, "images": [], "timings": timings}))
    page.ask("go")
    page.wait_for_answer("in the middle")
    assert rows(page) == {"intake": "0.10 ms", "queue": "1.0 ms", "prefill": "10.0 ms"}


def test_the_trace_is_linked_to_jaeger(page: Page) -> None:
    page.ask("go")
    page.wait_for_answer("in the middle")
    link = page.find(".facts a")
    assert link.get_attribute("href") == f"{JAEGER}/trace/{REPORT['trace_id']}"
    assert (link.get_attribute("target"), link.get_attribute("rel")) == ("_blank", "noreferrer")


def test_without_jaeger_the_command_that_shows_the_trace_is_named(page: Page, stub: StubGateway) -> None:
    stub.answers.append(Scripted(report={**REPORT, "trace_id": None}))
    page.ask("go")
    page.wait_for_answer("in the middle")
    assert facts(page)["Trace"] == "triptych trace request-1"


def test_only_the_newest_report_is_open(page: Page) -> None:
    page.ask("one")
    page.wait(lambda: len(page.find_all(".report")) == 1, "the first report")
    page.ask("two")
    page.wait(lambda: len(page.find_all(".report")) == 2, "the second report")
    assert [report.get_attribute("open") for report in page.find_all(".report")] == [None, "true"]


def test_a_degraded_answer_says_what_was_given_up(page: Page, stub: StubGateway) -> None:
    why = "the pictures were left out: encoding took longer than encode_timeout_s=5"
    stub.answers.append(Scripted(report={**REPORT, "degradations": [{"kind": "text_only", "explanation": why}]}))
    page.ask("go")
    page.wait_for_answer("in the middle")
    assert page.find(".note.degraded").text == f"Not as asked: {why}"


def test_an_answer_cut_off_by_its_length_says_so(page: Page, stub: StubGateway) -> None:
    stub.answers.append(Scripted(finish_reason="length"))
    page.ask("go")
    page.wait_for_answer("in the middle")
    assert page.find(".note").text.startswith("Cut off at the most tokens allowed.")


def test_the_live_view_shows_queues_and_the_kv_cache(page: Page, stub: StubGateway) -> None:
    page.wait(lambda: page.find("#waiting").text == "1", "the worker's queue")
    values = [page.find(f"#{name}").text for name in ("in-flight", "running", "kv-used", "kv-cached", "kv-free")]
    assert values == ["3", "2", "96", "410", "518 of 1,024"]
    assert page.find("#system-state").text == "Ready: pictures and text are answered."
    worker = stub.view.seen.worker
    assert worker is not None
    stub.view.seen = replace(stub.view.seen, worker=replace(worker, waiting=0, running=7))
    page.wait(lambda: page.find("#running").text == "7", "the next look")
    page.wait(lambda: "at most 7 running" in str(page.find("#history").get_attribute("aria-label")), "the history")


def test_the_live_view_says_what_is_missing(page: Page, stub: StubGateway) -> None:
    stub.view.seen = replace(stub.view.seen, ready=False, worker=None)
    page.wait(lambda: page.find("#system-state").text == "The worker does not answer.", "the words")
    assert page.find("#served").text == "demo: not ready"
    stub.view.seen = replace(stub.view.seen, ready=True, worker_known=False)
    page.wait(lambda: "address is not known" in page.find("#system-state").text, "the other words")


def test_a_model_that_comes_up_later_is_seen_without_a_reload(page: Page, stub: StubGateway) -> None:
    card, seen = stub.view.card, stub.view.seen
    stub.view.card, stub.view.seen = None, replace(seen, ready=False)
    page.driver.refresh()
    page.wait(lambda: page.find("#served").text == "not ready", "the page without a model")
    stub.view.card, stub.view.seen = card, seen
    page.wait(lambda: page.find("#served").text == "demo", "the model's name")
