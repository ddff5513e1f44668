"""What a person reads when an answer does not come."""

import pytest

from tests.gateway_page.browser import Page
from tests.gateway_page.stub import Scripted, StubGateway, event


def failure(page: Page) -> list[str]:
    """Waits for a failure and returns its lines."""
    page.wait(lambda: page.find_all(".failure"), "a failure")
    page.wait(lambda: page.button("Send"), "the send button is back")
    return page.find(".failure").text.splitlines()


@pytest.mark.parametrize(
    ("status", "code", "headers", "title", "advice"),
    [
        (400, "IMAGE_CORRUPT", {}, "The request was refused", "Open the picture, save it again, and send that."),
        (401, "invalid_api_key", {}, "This gateway wants an API key", "Enter it in the settings, then try again."),
        (413, "IMAGE_TOO_LARGE", {}, "That is too much at once", "Send a smaller version of the picture."),
        (
            429,
            "OVERLOADED",
            {"Retry-After": "2"},
            "Too many requests at once",
            "The system is full. Try again in a moment. Best after 2 seconds.",
        ),
        (
            503,
            "WORKER_UNAVAILABLE",
            {},
            "The system is not ready",
            "The worker does not answer. “triptych status” tells what is missing; then try again.",
        ),
        (504, "ENCODE_TIMEOUT", {}, "It took too long", "Try again, or choose less picture detail in the settings."),
        (507, None, {}, "Something went wrong inside", "Try again. If it stays, the services’ logs say why."),
    ],
)
def test_a_refusal_is_told_in_words_with_what_to_do(
    page: Page, stub: StubGateway, status: int, code: str | None, headers: dict[str, str], title: str, advice: str
) -> None:
    page.expected_errors.append("Failed to load resource")
    error = {"message": "the server's own words", "type": "some_error", "param": None, "code": code}
    stub.answers.append(Scripted(status=status, error=error, headers=headers))
    page.ask("go")
    assert failure(page) == [title, "the server's own words", advice, "Try again"]
    assert page.find(".failure").aria_role == "alert"


def test_trying_again_asks_the_same_question_in_the_same_place(
    page: Page, stub: StubGateway, picture: tuple[str, str, str]
) -> None:
    page.expected_errors.append("Failed to load resource")
    stub.answers.append(Scripted(status=503, error={"message": "", "code": "WORKER_UNAVAILABLE"}))
    page.give("drop", [picture])
    page.ask("go")
    failure(page)
    page.button("Try again").click()
    page.wait_for_answer("in the middle")
    assert page.find_all(".failure") == []
    assert stub.requests[0][0]["messages"] == stub.requests[1][0]["messages"]


def test_a_failed_question_is_no_part_of_the_chat(page: Page, stub: StubGateway) -> None:
    page.expected_errors.append("Failed to load resource")
    stub.answers.append(Scripted(status=429, error={"message": "full", "code": "OVERLOADED"}))
    page.ask("one")
    failure(page)
    page.ask("two")
    page.wait_for_answer("in the middle")
    assert [message["content"][0]["text"] for message in stub.requests[1][0]["messages"]] == ["two"]


def test_an_error_in_mid_answer_keeps_the_words_and_says_so(page: Page, stub: StubGateway) -> None:
    error = event({"error": {"message": "the worker was lost", "type": "server_error", "code": "WORKER_UNAVAILABLE"}})
    stub.answers.append(Scripted(steps=("half an ", error), broken=True))
    page.ask("go")
    assert failure(page)[:3] == [
        "The answer broke off",
        "the worker was lost",
        "The worker does not answer. “triptych status” tells what is missing; then try again.",
    ]
    assert page.answers() == ["half an"]


def test_a_stream_that_ends_without_its_end_is_a_failure(page: Page, stub: StubGateway) -> None:
    stub.answers.append(Scripted(steps=("half an ",), broken=True))
    page.ask("go")
    assert failure(page)[0] == "The answer broke off"


def test_a_gateway_that_is_gone_is_named(page: Page) -> None:
    page.expected_errors.append("ERR_")
    page.driver.set_network_conditions(offline=True, latency=0, throughput=0)
    try:
        page.ask("go")
        assert failure(page)[:2] == [
            "The gateway does not answer",
            "Check that “triptych up” still runs and that this device reaches it; then try again.",
        ]
        page.wait(lambda: page.find("#system-state").text.startswith("The gateway does not answer."), "the live view")
    finally:
        page.driver.delete_network_conditions()
    page.wait(lambda: page.find("#served").text == "demo", "the gateway is back")


def test_an_answer_that_is_no_json_is_still_told_in_words(page: Page, stub: StubGateway) -> None:
    stub.answers.append(Scripted(steps=(b"data: <html>\n\n",), broken=True))
    page.ask("go")
    assert failure(page)[0] == "Something went wrong inside"
