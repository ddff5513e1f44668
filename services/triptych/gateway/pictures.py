"""Pictures that a request names by URL: fetched only from hosts that the operator named."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

import httpx2

from triptych.config import GatewaySettings
from triptych.gateway.errors import ApiError

log = logging.getLogger(__name__)


class PictureFetcher:
    """Fetches pictures over https: from allowed hosts, without following redirects, within limits."""

    def __init__(self, settings: GatewaySettings, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._hosts = tuple(host.strip().lower() for host in settings.image_hosts.split(",") if host.strip())
        self._max_bytes = settings.max_image_bytes
        self._timeout_s = settings.image_timeout_s
        self._transport = transport
        self._client: httpx2.AsyncClient | None = None

    async def fetch_all(self, urls: Iterable[str]) -> Mapping[str, bytes]:
        """Returns the file behind each URL. Raises ApiError (400) for the first that cannot be had."""
        wanted = sorted(urls)
        for url in wanted:
            self._check(url)
        if not wanted:
            return {}
        tasks = [asyncio.create_task(self._fetch(url)) for url in wanted]
        try:
            return dict(zip(wanted, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Closes connections."""
        if self._client is not None:
            await self._client.aclose()

    def _check(self, text: str) -> None:
        try:
            url = httpx2.URL(text.strip())
        except (httpx2.InvalidURL, ValueError):
            raise _refused("is neither a data: URL nor a valid https URL") from None
        if url.scheme != "https" or url.userinfo or url.port not in (None, 443) or not url.host:
            raise _refused("must be a data: URL, or https without user and port")
        if not self._hosts:
            raise _refused("must be a data: URL: this server fetches no pictures (knob image_hosts)")
        host = url.host.lower()
        if not any(host == allowed or _is_below(host, allowed) for allowed in self._hosts):
            raise _refused(f"names the host {host}, from which this server fetches nothing (knob image_hosts)")

    async def _fetch(self, url: str) -> bytes:
        if self._client is None:
            self._client = httpx2.AsyncClient(
                transport=self._transport,
                follow_redirects=False,
                timeout=self._timeout_s,
                headers={"Accept": "image/*"},
            )
        data = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s), self._client.stream("GET", url.strip()) as response:
                if response.status_code != 200:
                    raise _failed(f"answered {response.status_code}")
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > self._max_bytes:
                        raise _failed(f"has more than max_image_bytes={self._max_bytes}")
        except TimeoutError:
            raise _failed(f"did not come within image_timeout_s={self._timeout_s:g}") from None
        except httpx2.HTTPError as error:
            log.info("a picture could not be fetched: %s", type(error).__name__)
            raise _failed("could not be fetched") from None
        return bytes(data)


def _is_below(host: str, allowed: str) -> bool:
    return allowed.startswith("*.") and host.endswith(allowed[1:])


def _refused(why: str) -> ApiError:
    return ApiError(400, f"image_url {why}", param="messages", code="image_url_unsupported")


def _failed(why: str) -> ApiError:
    return ApiError(400, f"a picture of image_url {why}", param="messages", code="image_fetch_failed")
