"""How the page looks: every width, light and dark, without motion, and with enough contrast."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.gateway_page.browser import Page
from tests.gateway_page.stub import REPORT, Scripted, StubGateway, event

# Returns [ratio, text] of every visible text whose contrast with what lies behind it is under 4.5 (WCAG 2.2, 1.4.3).
FAINT = """
const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const rgba = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const luminance = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = rgba(getComputedStyle(at).backgroundColor);
    if (colour[3] === 255) return colour;
  }
  return [255, 255, 255];
};
const faint = [];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const element = texts.currentNode.parentElement;
  if (!texts.currentNode.data.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
  if (element.matches(":disabled, script")) continue;
  const [a, b] = [luminance(rgba(getComputedStyle(element).color)), luminance(behind(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) faint.push([ratio, texts.currentNode.data]);
}
return faint;
"""


def fill(page: Page, stub: StubGateway, picture: tuple[str, str, str]) -> None:
    """Brings everything that can be seen onto the page: pictures, answers, notes, a failure, a thumbnail to send."""
    name, media_type, data = picture
    page.give(
        "drop", [picture, ("a-name-without-any-spaces-that-is-far-too-long-for-a-phone.tiff", "image/tiff", data[:8])]
    )
    degraded = {**REPORT, "degradations": [{"kind": "text_only", "explanation": "encoding was late"}]}
    long_word = "antidisestablishmentarianism" * 4
    stub.answers.append(Scripted(steps=(long_word,), report=degraded, finish_reason="length"))
    page.ask("where is the star? " + long_word)
    page.wait_for_answer(long_word)
    error = {"message": "x" * 200, "code": "WORKER_UNAVAILABLE"}
    stub.answers.append(Scripted(steps=("half ", event({"error": error})), broken=True))
    page.ask("and now?")
    page.wait(lambda: page.find_all(".failure"), "the failure")
    page.find(".report summary").send_keys(Keys.ENTER)
    page.give("drop", [(name, media_type, data), ("notes.txt", "text/plain", "")])


@pytest.mark.parametrize("width", [360, 768, 1024, 1920])
def test_no_width_needs_sideways_scrolling(
    page: Page, stub: StubGateway, picture: tuple[str, str, str], width: int
) -> None:
    page.emulate(width, 740)
    fill(page, stub, picture)
    if width < 1024:
        page.button("System").click()
        assert page.find("#system").is_displayed()
        assert page.find("#show-system").get_attribute("aria-expanded") == "true"
    wide, shown = page.driver.execute_script(
        "const e = document.documentElement; return [e.scrollWidth, e.clientWidth]"
    )
    assert wide <= shown
    page.button("Settings").click()
    box = page.find("#settings").rect
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_enough_contrast(
    page: Page, stub: StubGateway, picture: tuple[str, str, str], scheme: str
) -> None:
    page.emulate(prefers_color_scheme=scheme)
    fill(page, stub, picture)
    assert page.driver.execute_script(FAINT) == []
    page.button("Settings").click()
    assert page.driver.execute_script(FAINT) == []
    ground = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(246, 247, 249)", "dark": "rgb(13, 19, 32)"}[scheme]


def test_nothing_moves_for_people_who_want_no_motion(page: Page, stub: StubGateway) -> None:
    page.emulate(prefers_reduced_motion="reduce")
    stub.answers.append(Scripted(steps=(2.0, "done")))
    page.ask("go")
    page.wait(lambda: page.find_all(".panels"), "the sign of waiting")
    assert page.driver.execute_script("return document.getAnimations().length") == 0
    page.wait_for_answer("done")


def test_every_control_has_a_name_and_is_large_enough_for_a_finger(page: Page) -> None:
    page.emulate(360, 740)
    page.button("Settings").click()
    for part in ("#settings", "body > :not(dialog)"):
        for control in page.find_all(f"{part} :is(button, select, textarea, input:not([type=file]))"):
            if control.is_displayed():
                assert control.accessible_name, control.get_attribute("outerHTML")
                assert min(control.rect["width"], control.rect["height"]) >= 24, control.accessible_name
        if part == "#settings":
            page.button("Done").click()


def test_the_composer_never_covers_the_end_of_the_conversation(
    page: Page, stub: StubGateway, picture: tuple[str, str, str]
) -> None:
    page.emulate(360, 640)
    fill(page, stub, picture)
    page.driver.execute_script("scrollTo(0, document.documentElement.scrollHeight)")
    last = page.find_all("#turns > li")[-1].find_element(By.CSS_SELECTOR, ".failure button")
    bottom, top = page.driver.execute_script(
        "return [arguments[0].getBoundingClientRect().bottom, composer.getBoundingClientRect().top]", last
    )
    assert bottom <= top
