"""Asks an HTTP service whether it is ready: 200 at a URL. Small, because the router's image has no HTTP client."""

import asyncio
import contextlib
from urllib.parse import urlsplit

PROBE_TIMEOUT_S = 2.0


async def answers_ok(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """Tells whether GET of a plain http URL answers 200 in time."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError, TimeoutError, ValueError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
            try:
                head = f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                status = await reader.readline()
            finally:
                writer.close()
        return status.split()[1:2] == [b"200"]
    return False
