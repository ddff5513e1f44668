"""Asking and answering, by keyboard and by mouse."""

from selenium.webdriver.common.keys import Keys

from tests.gateway_page.browser import Page
from tests.gateway_page.stub import Scripted, StubGateway


def test_a_question_is_sent_with_enter_and_the_focus_stays_in_the_text(page: Page, stub: StubGateway) -> None:
    page.ask("what is a star?")
    page.wait_for_answer("in the middle")
    assert page.focused() == "Your question"
    body, _ = stub.requests[0]
    assert body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "what is a star?"}]}]
    assert (body["model"], body["stream"]) == ("demo", True)


def test_shift_and_enter_start_a_new_line(page: Page, stub: StubGateway) -> None:
    page.press("one")
    page.press_together(Keys.SHIFT, Keys.ENTER)
    page.press("two", Keys.ENTER)
    page.wait_for_answer("in the middle")
    assert stub.requests[0][0]["messages"][0]["content"][0]["text"] == "one\ntwo"


def test_the_page_can_be_used_with_the_tab_key_alone(page: Page) -> None:
    page.driver.execute_script("document.querySelector('a').focus()")
    names = [page.focused()]
    while "Send" not in names:
        page.press(Keys.TAB)
        names.append(page.focused())
        assert len(names) < 15, names
    assert names == [
        "Skip to your question",
        "New chat",
        "Settings",
        "Try the sample picture “where is the star?”",
        "Your question",
        "Add pictures",
        "Take a picture",
        "Send",
    ]


def test_words_appear_while_the_answer_is_still_being_written(page: Page, stub: StubGateway) -> None:
    stub.answers.append(Scripted(steps=("first ", 2.0, "second")))
    page.ask("go")
    page.wait(lambda: page.answers() == ["first"], "the first word alone")
    assert page.find(".answered").get_attribute("aria-busy") == "true"
    page.wait_for_answer("first second")
    assert page.find(".answered").get_attribute("aria-busy") is None


def test_characters_split_between_packets_arrive_whole(page: Page, stub: StubGateway) -> None:
    comment = b": a comment\r\n\r\nevent: message\r\n"
    stub.answers.append(Scripted(steps=("ein grüner ", comment, "Stern ⭐"), byte_by_byte=True))
    page.ask("was ist das?")
    page.wait_for_answer("ein grüner Stern ⭐")


def test_stop_ends_the_request_and_keeps_what_was_written(page: Page, stub: StubGateway) -> None:
    stub.answers.append(Scripted(steps=("only this", 30.0, "never")))
    page.ask("go")
    page.wait(lambda: page.answers() == ["only this"], "the first words")
    page.button("Stop").click()
    page.wait(lambda: page.button("Send"), "the send button is back")
    assert stub.left.wait(5), "the gateway still believes that somebody listens"
    assert page.find(".note").text == "Stopped."
    assert page.focused() == "Your question"
    page.ask("go on")
    page.wait_for_answer("in the middle")
    roles = [(message["role"], message["content"]) for message in stub.requests[1][0]["messages"]]
    assert roles[1] == ("assistant", "only this")


def test_escape_stops_and_an_answer_without_a_word_is_no_part_of_the_chat(page: Page, stub: StubGateway) -> None:
    stub.answers.append(Scripted(steps=(30.0,)))
    page.ask("go")
    page.wait(lambda: page.button("Stop"), "the stop button")
    page.wait(lambda: len(stub.requests) == 1, "the request")
    page.press(Keys.ESCAPE)
    page.wait(lambda: page.button("Send"), "the send button is back")
    assert page.find(".note").text == "Stopped before the first word."
    page.ask("again")
    page.wait_for_answer("in the middle")
    assert [message["role"] for message in stub.requests[1][0]["messages"]] == ["user"]


def test_earlier_turns_and_their_pictures_are_sent_again(
    page: Page, stub: StubGateway, picture: tuple[str, str, str]
) -> None:
    page.give("paste", [picture])
    page.wait(lambda: page.pending() == ["picture.png"], "the thumbnail")
    page.ask("where is the star?")
    page.wait_for_answer("in the middle")
    page.ask("what colour is it?")
    page.wait(lambda: len(page.answers()) == 2, "a second answer")
    page.wait_for_answer("in the middle")
    messages = stub.requests[1][0]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0]["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture[2]}"}},
        {"type": "text", "text": "where is the star?"},
    ]


def test_a_new_chat_forgets_the_old_one(page: Page, stub: StubGateway) -> None:
    page.ask("one")
    page.wait_for_answer("in the middle")
    page.button("New chat").click()
    assert page.answers() == []
    assert page.find("#welcome").is_displayed()
    assert page.focused() == "Your question"
    page.ask("two")
    page.wait_for_answer("in the middle")
    assert len(stub.requests[1][0]["messages"]) == 1


def test_a_new_chat_ends_a_running_answer(page: Page, stub: StubGateway) -> None:
    stub.answers.append(Scripted(steps=("word", 30.0)))
    page.ask("one")
    page.wait(lambda: page.answers() == ["word"], "the first word")
    page.button("New chat").click()
    assert stub.left.wait(5)
    page.wait(lambda: page.button("Send"), "the send button is back")
    page.ask("two")
    page.wait_for_answer("in the middle")
    assert len(stub.requests[1][0]["messages"]) == 1


def test_a_screen_reader_hears_the_whole_answer_once(page: Page, stub: StubGateway) -> None:
    page.driver.execute_script(
        "window.heard = []; new MutationObserver(() => heard.push(announcer.textContent))"
        ".observe(announcer, { childList: true })"
    )
    stub.answers.append(Scripted(steps=[f"{number} " for number in range(20)]))
    page.ask("count")
    page.wait(lambda: page.find_all(".report"), "the report")
    numbers = " ".join(map(str, range(20)))
    heard = [text.strip() for text in page.driver.execute_script("return heard")]
    assert heard == ["Sent. Waiting for the answer.", f"Answer: {numbers}"]
    assert page.find(".answered").aria_role == "article"


def test_the_settings_are_sent_and_remembered(page: Page, stub: StubGateway) -> None:
    page.button("Settings").click()
    page.wait(lambda: page.find("#settings").is_displayed(), "the settings")
    options = [option.text for option in page.find_all("#detail option")]
    assert options[0] == "High: 112 px, 64 tokens"
    assert options[2] == "Low: 56 px, 16 tokens"
    page.find("#detail").send_keys("low")
    page.find("#temperature").send_keys(Keys.BACKSPACE, "0.7")
    page.find("#maxTokens").send_keys("33")
    page.find("#priority").send_keys("econ")
    page.find("#key").send_keys("secret")
    page.button("Done").click()
    page.driver.refresh()
    page.wait(lambda: "demo" in page.find("#served").text, "the page again")
    page.ask("go")
    page.wait_for_answer("in the middle")
    body, headers = stub.requests[0]
    assert body["triptych"] == {"priority": "economy", "resolution": "low"}
    assert (body["temperature"], body["max_completion_tokens"]) == (0.7, 33)
    assert headers["authorization"] == "Bearer secret"
    assert "secret" not in page.driver.execute_script("return JSON.stringify(localStorage)")


def test_without_settings_the_servers_own_length_is_used_and_no_key_sent(page: Page, stub: StubGateway) -> None:
    page.ask("go")
    page.wait_for_answer("in the middle")
    body, headers = stub.requests[0]
    assert "max_completion_tokens" not in body
    assert body["triptych"] == {"priority": "interactive", "resolution": "high"}
    assert "authorization" not in headers


def test_markup_in_an_answer_is_shown_as_it_is(page: Page, stub: StubGateway) -> None:
    stub.answers.append(Scripted(steps=("<img src=x onerror=alert(1)>",)))
    page.ask("<b>go</b>")
    page.wait_for_answer("<img src=x onerror=alert(1)>")
    assert page.find(".asked").text == "<b>go</b>"


def test_nothing_is_sent_when_there_is_nothing_to_say(page: Page, stub: StubGateway) -> None:
    page.press(Keys.ENTER)
    assert page.find("#notice").text == "Write a question or add a picture first."
    assert stub.requests == []
