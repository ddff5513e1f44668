"""Pictures by URL: only from named hosts, within limits, and never by another way in."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from triptych.config import GatewaySettings
from triptych.gateway.errors import ApiError
from triptych.gateway.pictures import PictureFetcher

Behaviour = Callable[[httpx2.Request], Any]


def fetcher(behaviour: Behaviour, **knobs: Any) -> PictureFetcher:
    settings = GatewaySettings(**{"image_hosts": "pictures.example, *.cdn.example", **knobs})
    return PictureFetcher(settings, httpx2.MockTransport(behaviour))


async def refusal(fetcher: PictureFetcher, url: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await fetcher.fetch_all([url])
    await fetcher.close()
    assert caught.value.status_code == 400
    return caught.value


async def test_pictures_of_named_hosts_come_each_once_and_by_their_url() -> None:
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(str(request.url))
        return httpx2.Response(200, content=request.url.path.encode())

    pictures = fetcher(answer)
    urls = {"https://pictures.example/a", "https://one.cdn.example/b"}
    assert await pictures.fetch_all(urls) == {
        "https://pictures.example/a": b"/a",
        "https://one.cdn.example/b": b"/b",
    }
    assert sorted(asked) == sorted(urls)
    await pictures.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.example/a",
        "https://cdn.example/a",
        "https://evilcdn.example/a",
        "https://pictures.example.evil/a",
        "https://pictures.example@evil.example/a",
        "https://user:word@pictures.example/a",
        "https://pictures.example:8443/a",
        "https://127.0.0.1/a",
        "https://[::1]/a",
        "file:///etc/passwd",
        "ftp://pictures.example/a",
        "https://",
        "pictures.example/a",
        "",
        "https://pict\nures.example/a",
        "https://pictures.example\\@evil.example/a",
    ],
)
async def test_nothing_else_is_asked_for(url: str) -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        raise AssertionError("no request may leave")

    assert (await refusal(fetcher(answer), url)).body.error.code == "image_url_unsupported"


async def test_a_redirect_is_not_followed() -> None:
    pictures = fetcher(lambda request: httpx2.Response(302, headers={"Location": "https://evil.example/a"}))
    error = await refusal(pictures, "https://pictures.example/a")
    assert error.body.error.code == "image_fetch_failed" and "302" in error.body.error.message


async def test_a_picture_that_is_too_large_or_too_late_is_named_with_its_knob() -> None:
    async def late(request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(5)
        return httpx2.Response(200)

    large = fetcher(lambda request: httpx2.Response(200, content=b"x" * 2048), max_image_bytes=1024)
    assert "max_image_bytes" in (await refusal(large, "https://pictures.example/a")).body.error.message
    slow = fetcher(late, image_timeout_s=0.05)
    assert "image_timeout_s" in (await refusal(slow, "https://pictures.example/a")).body.error.message
