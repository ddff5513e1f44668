"""The page in a real Chromium, as a person finds it: by labels and words."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 30.0

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-prefers-no-reduced-motion",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
    "--window-size=1280,860",
)

# Hands files to the page as the browser does when they are dropped or pasted. Its arguments: the kind, then a list of
# [name, type, base64].
GIVE_FILES = """
const [kind, files] = arguments;
const data = new DataTransfer();
for (const [name, type, base64] of files) {
  data.items.add(new File([Uint8Array.from(atob(base64), (c) => c.charCodeAt(0))], name, { type }));
}
const target = document.activeElement ?? document.body;
const names = kind === "drop" ? ["dragenter", "dragover", "drop"] : [kind];
for (const name of names) {
  const Type = kind === "paste" ? ClipboardEvent : DragEvent;
  const member = kind === "paste" ? "clipboardData" : "dataTransfer";
  target.dispatchEvent(new Type(name, { [member]: data, bubbles: true, cancelable: true }));
}
"""


@contextmanager
def running_chromium(binary: str, chromedriver: str, profile: Path) -> Iterator[webdriver.Chrome]:
    """Yields a fresh Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The page, opened.

    Attributes:
        expected_errors: Parts of console errors that a test provokes; any other one fails it.
    """

    def __init__(self, driver: webdriver.Chrome, origin: str) -> None:
        self.driver = driver
        self.origin = origin
        self.expected_errors: list[str] = []

    def open(self, model: str = "demo") -> None:
        """Opens the page anew, with nothing remembered, and waits until it knows the model."""
        self.driver.get(f"{self.origin}/ui/icon.svg")
        self.driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        for name in ("browser", "performance"):
            self._new_entries(name)
        self.driver.get(self.origin)
        self.wait(lambda: model in self.find("#served").text, f"the page says {model}")

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def find_all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def button(self, label: str) -> WebElement:
        """Returns the visible button of this accessible name."""
        for button in self.find_all("button"):
            if button.is_displayed() and button.accessible_name == label:
                return button
        raise AssertionError(f"no button {label!r}")

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        WebDriverWait(self.driver, WAIT_S, 0.05).until(lambda _: condition(), what)

    def press(self, *keys: str) -> None:
        """Presses keys where the focus is."""
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def press_together(self, held: str, key: str) -> None:
        """Presses a key while another is held."""
        webdriver.ActionChains(self.driver).key_down(held).send_keys(key).key_up(held).perform()

    def ask(self, question: str) -> None:
        """Types a question where the focus is, and sends it."""
        self.press(question, Keys.ENTER)

    def answers(self) -> list[str]:
        return [answer.text.strip() for answer in self.find_all(".answered .text")]

    def wait_for_answer(self, text: str) -> None:
        self.wait(lambda: self.answers()[-1:] == [text] and self.button("Send"), f"the answer {text!r}")

    def focused(self) -> str:
        """Returns the accessible name of what has the focus."""
        return self.driver.switch_to.active_element.accessible_name

    def give(self, kind: str, files: Sequence[tuple[str, str, str]]) -> None:
        """Drops or pastes files, each as name, type and base64."""
        self.driver.execute_script(GIVE_FILES, kind, [list(file) for file in files])

    def pending(self) -> list[str]:
        return [str(image.get_attribute("alt")) for image in self.find_all("#pending img")]

    def emulate(self, width: int = 1280, height: int = 860, scale: float = 1, **features: str) -> None:
        """Sets the viewport's size in CSS pixels and media features such as prefers_color_scheme."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        values = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": values})

    def console_errors(self) -> list[str]:
        """Returns errors and warnings of the console that no test expects."""
        messages = [str(entry["message"]) for entry in self._new_entries("browser") if entry["level"] != "INFO"]
        return [text for text in messages if not any(expected in text for expected in self.expected_errors)]

    def foreign_requests(self) -> list[str]:
        """Returns the URLs asked for that are not the gateway's own."""
        urls = []
        for entry in self._new_entries("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                urls.append(message["params"]["request"]["url"])
        assert urls, "the browser's log of requests is empty"
        return [url for url in urls if not url.startswith((f"{self.origin}/", f"blob:{self.origin}/"))]

    def _new_entries(self, name: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = self.driver.get_log(name)  # type: ignore[no-untyped-call]
        return entries
