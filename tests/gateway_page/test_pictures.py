"""The ways a picture gets into a message, and out again."""

import base64
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.gateway_page.browser import Page
from tests.gateway_page.stub import StubGateway

Picture = tuple[str, str, str]


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_a_picture_can_be_given(page: Page, stub: StubGateway, picture: Picture, kind: str) -> None:
    page.give(kind, [picture])
    page.wait(lambda: page.pending() == ["picture.png"], "the thumbnail")
    assert page.focused() == "Your question"
    page.press(Keys.ENTER)
    page.wait_for_answer("in the middle")
    content = stub.requests[0][0]["messages"][0]["content"]
    assert content == [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture[2]}"}}]
    assert page.find(".asked img").get_attribute("alt") == "picture.png"
    assert page.pending() == []


def test_files_are_chosen_with_the_button(page: Page, picture: Picture, tmp_path: Path) -> None:
    paths = [tmp_path / "one.png", tmp_path / "two.png"]
    for path in paths:
        path.write_bytes(base64.b64decode(picture[2]))
    page.find("#files").send_keys("\n".join(map(str, paths)))
    page.wait(lambda: page.pending() == ["one.png", "two.png"], "both thumbnails")
    page.find("#files").send_keys(str(paths[0]))
    page.wait(lambda: page.pending() == ["one.png", "two.png", "one.png"], "the same file once more")


def test_the_page_says_where_to_drop_while_a_file_is_over_it(page: Page) -> None:
    drag = (
        "const data = new DataTransfer(); data.items.add(new File([], 'a.png', { type: 'image/png' }));"
        "document.body.dispatchEvent(new DragEvent(arguments[0], { dataTransfer: data, bubbles: true }))"
    )
    page.driver.execute_script(drag, "dragenter")
    assert page.find("#drop").is_displayed()
    page.driver.execute_script(drag, "dragleave")
    assert not page.find("#drop").is_displayed()


def test_removing_a_picture_by_keyboard_moves_the_focus_on(page: Page, picture: Picture) -> None:
    _, media_type, data = picture
    page.give("drop", [("one.png", media_type, data), ("two.png", media_type, data)])
    page.wait(lambda: len(page.pending()) == 2, "both thumbnails")
    page.button("Remove one.png").send_keys(Keys.ENTER)
    assert page.focused() == "Remove two.png"
    page.press(Keys.ENTER)
    assert page.focused() == "Your question"
    assert page.pending() == []


def test_pasted_text_stays_text(page: Page, stub: StubGateway) -> None:
    page.driver.execute_script(
        "const data = new DataTransfer(); data.setData('text/plain', 'words');"
        "const event = new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true });"
        "window.taken = !document.activeElement.dispatchEvent(event)"
    )
    assert page.driver.execute_script("return taken") is False


def test_a_file_that_is_no_picture_is_refused_in_words(page: Page, picture: Picture) -> None:
    page.give("drop", [("notes.txt", "text/plain", "aGVsbG8="), picture])
    page.wait(lambda: page.pending() == ["picture.png"], "the picture alone")
    assert page.find("#notice").text == "Not a picture that can be sent: notes.txt."


def test_a_picture_the_browser_cannot_draw_is_shown_by_name_and_sent(page: Page, stub: StubGateway) -> None:
    page.give("drop", [("scan.tiff", "image/tiff", "SUkqAAgAAAA=")])
    page.wait(lambda: page.find("#pending .no-preview").text == "scan.tiff", "the name")
    page.ask("what is this?")
    page.wait_for_answer("in the middle")
    assert stub.requests[0][0]["messages"][0]["content"][0]["image_url"]["url"] == "data:image/tiff;base64,SUkqAAgAAAA="


def test_more_pictures_than_the_model_takes_are_refused_earlier_turns_included(page: Page, picture: Picture) -> None:
    page.give("drop", [picture] * 3)
    page.ask("go")
    page.wait_for_answer("in the middle")
    page.give("drop", [picture] * 2)
    page.wait(lambda: len(page.pending()) == 1, "one more picture")
    assert page.find("#notice").text == (
        "The model takes no more pictures in one chat. Start a new chat to send others."
    )
    page.button("New chat").click()
    page.give("drop", [picture] * 4)
    page.wait(lambda: len(page.pending()) == 4, "four pictures")


def test_the_camera_takes_a_picture(page: Page, stub: StubGateway) -> None:
    page.button("Take a picture").click()
    page.wait(lambda: page.button("Take picture").is_enabled(), "the camera's picture")
    page.wait(lambda: page.focused() == "Take picture", "the focus on the shutter")
    page.press(Keys.ENTER)
    page.wait(lambda: page.pending() == ["camera.jpg"], "the thumbnail")
    assert page.driver.execute_script("return document.querySelector('video').srcObject") is None
    page.ask("what is this?")
    page.wait_for_answer("in the middle")
    url = stub.requests[0][0]["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))[:2] == b"\xff\xd8"


def test_a_camera_that_may_not_be_used_is_explained(page: Page) -> None:
    page.driver.execute_script(
        "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('no', 'NotAllowedError'); }"
    )
    page.button("Take a picture").click()
    page.wait(lambda: page.find("#camera-note").text.startswith("The browser was not allowed"), "the explanation")
    page.press(Keys.ESCAPE)
    page.wait(lambda: not page.find("#camera").is_displayed(), "the dialog is closed")


def test_the_sample_picture_comes_with_its_question(page: Page, stub: StubGateway, picture: Picture) -> None:
    page.find("#sample").click()
    page.wait(lambda: page.pending() == ["sample.png"], "the sample")
    page.press(Keys.ENTER)
    page.wait_for_answer("in the middle")
    image, text = stub.requests[0][0]["messages"][0]["content"]
    assert image["image_url"]["url"].endswith(picture[2])
    assert text["text"] == "where is the star?"
