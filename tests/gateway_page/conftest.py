"""A Chromium for all tests here, and the page in it with scripted answers behind."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver

import triptych
from tests.gateway_page.browser import Page, running_chromium
from tests.gateway_page.stub import StubGateway, running_stub


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs a browser is no unit test."""
    for item in items:
        if Path(__file__).parent in item.path.parents and "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    binary, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or chromedriver is None:
        pytest.skip("needs Chromium: apt-get install chromium chromium-driver")
    with running_chromium(binary, chromedriver, tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture(scope="session")
def stub_server() -> Iterator[StubGateway]:
    with running_stub() as stub:
        yield stub


@pytest.fixture
def stub(stub_server: StubGateway) -> StubGateway:
    """The stub gateway with an empty script."""
    fresh = StubGateway(stub_server.origin)
    stub_server.view.card, stub_server.view.seen = fresh.view.card, fresh.view.seen
    stub_server.answers.clear()
    stub_server.requests.clear()
    stub_server.left.clear()
    return stub_server


@pytest.fixture
def page(chromium: webdriver.Chrome, stub: StubGateway) -> Iterator[Page]:
    """The page, just opened; afterwards the console must be clean and no request have left the origin."""
    page = Page(chromium, stub.origin)
    page.emulate()
    page.open()
    yield page
    assert page.console_errors() == []
    assert page.foreign_requests() == []


@pytest.fixture(scope="session")
def picture() -> tuple[str, str, str]:
    """The bundled picture as name, type and base64."""
    path = Path(triptych.__file__).with_name("demo") / "picture.png"
    return path.name, "image/png", base64.b64encode(path.read_bytes()).decode()
