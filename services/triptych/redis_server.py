"""A server that speaks Redis's protocol, as a cache: what it does not answer in time it does not have."""

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import redis

from triptych.breaker import Breaker

_PREFIX = struct.Struct("<8sII")  # Magic, length of the description, CRC-32 of all that follows.


class RedisServer:
    """Asks with a deadline each time, and leaves the server alone for a while after failures in a row. Thread-safe.

    Attributes:
        client: For use inside `ask` only.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Connects at the first use. Raises ValueError when the URL is none of redis://, rediss:// or unix://."""
        self.client = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=None)
        self._breaker = Breaker()

    @property
    def is_worth_asking(self) -> bool:
        """Whether the server answered lately, or may be tried again."""
        return self._breaker.is_closed

    def ask(
        self,
        request: Callable[["redis.Redis"], Any],
        failed: Callable[[Exception], None],
        recovered: Callable[[], None],
    ) -> Any:
        """Returns what `request` returns, or None when the server failed or was not asked.

        Calls `failed` with the error of a failure, `recovered` when a series of them has ended.
        """
        if not self._breaker.may_try():
            return None
        try:
            answer = request(self.client)
        except (redis.RedisError, OSError) as error:
            self._breaker.failed()
            failed(error)
            return None
        if self._breaker.succeeded():
            recovered()
        return answer

    def close(self) -> None:
        """Closes the connections."""
        self.client.close()


def pack(magic: bytes, about: Any, data: memoryview) -> bytes:
    """Returns a value to store: `magic` (8 bytes), a description as JSON, and data, with a checksum over both."""
    described = json.dumps(about).encode()
    checksum = zlib.crc32(data, zlib.crc32(described))
    return b"".join((_PREFIX.pack(magic, len(described), checksum), described, data))


def unpack(magic: bytes, value: bytes) -> tuple[Any, memoryview] | None:
    """Returns the description and the data that `pack` was given, or None when the value is anything else."""
    try:
        found, length, checksum = _PREFIX.unpack_from(value)
        if found != magic or zlib.crc32(memoryview(value)[_PREFIX.size :]) != checksum:
            return None
        return describe(value), memoryview(value)[_PREFIX.size + length :]
    except (struct.error, ValueError):
        return None


def describe(value: bytes) -> Any:
    """Returns the description at the beginning of a value, unchecked. Raises struct.error and ValueError."""
    _, length, _ = _PREFIX.unpack_from(value)
    return json.loads(value[_PREFIX.size : _PREFIX.size + length])
