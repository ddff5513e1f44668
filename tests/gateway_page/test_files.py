"""The page's files as HTTP serves them; no browser needed."""

import re
from collections.abc import Iterator

import httpx2
import pytest

from tests.gateway_page.stub import StubGateway, running_stub


@pytest.fixture(scope="module")
def files() -> Iterator[httpx2.Client]:
    with running_stub() as stub, httpx2.Client(base_url=stub.origin) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/ui/app.js", "text/javascript; charset=utf-8"),
        ("/ui/style.css", "text/css; charset=utf-8"),
        ("/ui/icon.svg", "image/svg+xml"),
        ("/ui/picture.png", "image/png"),
        ("/ui/config.json", "application/json"),
        ("/ui/state.json", "application/json"),
    ],
)
def test_each_file_has_its_type_and_a_strict_policy(files: httpx2.Client, path: str, media_type: str) -> None:
    response = files.get(path)
    assert (response.status_code, response.headers["content-type"]) == (200, media_type)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


def test_a_known_file_is_not_sent_again(files: httpx2.Client) -> None:
    first = files.get("/ui/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again = files.get("/ui/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    changed = files.get("/ui/app.js", headers={"If-None-Match": 'W/"another"'})
    assert changed.content == first.content


def test_the_state_is_never_kept(files: httpx2.Client) -> None:
    assert files.get("/ui/state.json").headers["cache-control"] == "no-store"


def test_head_tells_the_same_without_the_body(files: httpx2.Client) -> None:
    response = files.head("/")
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize("path", ["/ui/nothing.js", "/ui/..%2f__init__.py", "/ui/%2e%2e/view.py"])
def test_only_the_pages_own_files_are_served(files: httpx2.Client, path: str) -> None:
    assert files.get(path).status_code == 404


def test_the_page_is_small_and_every_file_of_it_is_used(files: httpx2.Client) -> None:
    seen: set[str] = set()
    waiting = ["/"]
    size_bytes = 0
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        response = files.get(path)
        assert response.status_code == 200, path
        size_bytes += int(response.headers["content-length"])  # As sent: compressed.
        if path.endswith((".js", "/")):
            waiting += [
                f"/ui/{name}" for name in re.findall(r'"(?:\./|ui/)([a-z]+\.(?:js|css|svg|png))"', response.text)
            ]
    assert size_bytes < 60_000
    assert len(seen) == 14, sorted(seen)


def test_nothing_in_the_page_names_another_server(files: httpx2.Client) -> None:
    for path in ("/", "/ui/app.js", "/ui/api.js", "/ui/style.css", "/ui/system.js", "/ui/turn.js"):
        assert not re.search(r"(https?:)?//[a-z]+\.", files.get(path).text), path


def test_the_page_is_no_part_of_the_api_description(files: httpx2.Client) -> None:
    app = StubGateway("http://localhost").app()
    assert list(app.openapi()["paths"]) == ["/v1/chat/completions"]
