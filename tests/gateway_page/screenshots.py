"""Takes the documentation's pictures of the page, on a real stack under some load.

python -m tests.gateway_page.screenshots docs
"""

import base64
import io
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

import triptych
from tests.gateway_page.browser import Page, running_chromium
from tests.stack.conftest import START_TIMEOUT_S, Up, environment_of, noise_png, start_up
from triptych.client import Client, Options, user
from triptych.stack import StackSettings

LOAD_S = 25.0


def main(folder: Path) -> None:
    """Writes the pictures into `folder`."""
    sample = Path(triptych.__file__).with_name("demo") / "picture.png"
    file = (sample.name, "image/png", base64.b64encode(sample.read_bytes()).decode())
    binary, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    assert binary is not None
    assert chromedriver is not None
    profile = Path(tempfile.mkdtemp())
    with _stack() as up, running_chromium(binary, chromedriver, profile) as driver, _load(up.router):
        page = Page(driver, up.http.replace("127.0.0.1", "localhost"))
        page.emulate(1180, 800, prefers_color_scheme="light")
        page.open()
        time.sleep(LOAD_S)
        page.give("drop", [file])
        _ask(page, "what can you see in the middle of the picture?", 1)
        _keep(page, folder / "page-encoded.png")
        _ask(page, "what colour is it?", 2)
        page.emulate(1180, 800, prefers_color_scheme="dark")
        time.sleep(1)
        _keep(page, folder / "page-cached.png")
        page.emulate(360, 720, scale=2, prefers_color_scheme="light")
        page.driver.execute_script("scrollTo(0, document.documentElement.scrollHeight)")
        time.sleep(1)
        _keep(page, folder / "page-phone.png")
    shutil.rmtree(profile)


def _ask(page: Page, question: str, count: int) -> None:
    page.ask(question)
    page.wait(lambda: len(page.find_all(".report")) == count, "the report")
    print(question, "->", page.answers()[-1])


def _keep(page: Page, path: Path) -> None:
    Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB").save(path, optimize=True)
    print(f"{path}: {path.stat().st_size // 1024} kB")


@contextmanager
def _stack() -> Iterator[Up]:
    environment = environment_of(StackSettings.from_environment().on_free_ports())
    up = start_up({**environment, "TRIPTYCH_GATEWAY_JAEGER_URL": "http://localhost:16686"})
    try:
        assert up.ready.wait(2 * START_TIMEOUT_S), "the stack did not get ready"
        yield up
    finally:
        up.stop()


@contextmanager
def _load(router: str) -> Iterator[None]:
    """Runs a few clients, so that the live view has something to show."""
    done = threading.Event()

    def client(number: int) -> None:
        with Client(router) as service:
            for turn in range(10_000):
                if done.is_set():
                    return
                seed = number * 10_000 + turn
                options = Options(max_tokens=150, ignore_eos=True, priority="economy")
                for _ in service.stream([user(noise_png(seed), "what is in the picture?")], options):
                    pass
                done.wait((seed * 37 % 100) / 50)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
