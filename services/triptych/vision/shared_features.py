"""Features on a server that speaks Redis's protocol: what one router had encoded, no other one encodes."""

import asyncio
import json
import logging
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from triptych.breaker import Breaker
from triptych.config import RouterSettings

log = logging.getLogger(__name__)

Features = npt.NDArray[Any]

_MAGIC = b"TRIPTFE\x01"
_PREFIX = struct.Struct("<8sII")  # Magic, length of the description, CRC-32 of all that follows.
_TYPES = ("<f4", "<f2")
_THREADS = 4
_MOST_PENDING = 16


class SharedFeatures:
    """A cache behind the router's own. Absent, slow or damaged is a miss, and a request waits no longer than a timeout.

    Keys are image identities, which stand for pixels, preprocessing, encoder and tenant. Used from one event loop;
    the server is asked by threads of its own.
    """

    def __init__(self, url: str, timeout_s: float, ttl_s: int) -> None:
        """Connects at the first use. Raises ValueError for a URL that is none."""
        import redis  # Only who uses it needs the client library.

        self._client = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=None)
        self._timeout_s, self._ttl_s = timeout_s, ttl_s
        self._breaker = Breaker()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="features")
        self._pending = 0
        self._logged = False

    async def get(self, identity: bytes) -> Features | None:
        """Returns the features of an image, [tokens, hidden_size], or None."""
        if not self._breaker.is_closed:
            return None
        loop = asyncio.get_running_loop()
        look = loop.run_in_executor(self._threads, self._ask, lambda: self._client.get(_key(identity)))
        try:
            # Connecting and asking have a timeout each, and threads may all be busy.
            value = await asyncio.wait_for(look, 2 * self._timeout_s)
        except TimeoutError:
            return None
        return None if value is None else _decode(value)

    def put_soon(self, identity: bytes, features: Features) -> None:
        """Sends features while nobody waits; leaves it when many are on their way already, or the server is gone."""
        if self._pending >= _MOST_PENDING or features.dtype.str not in _TYPES or not self._breaker.is_closed:
            return
        self._pending += 1
        send = asyncio.get_running_loop().run_in_executor(self._threads, self._send, identity, features)
        send.add_done_callback(self._sent)

    def close(self) -> None:
        """Ends the threads and the connections."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _sent(self, _: object) -> None:
        self._pending -= 1

    # From here on: in the threads.

    def _send(self, identity: bytes, features: Features) -> None:
        self._ask(lambda: self._client.set(_key(identity), _encode(features), ex=self._ttl_s))

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Returns the server's answer, or None when there is none or it was not asked."""
        import redis

        if not self._breaker.may_try():
            return None
        try:
            answer = request()
        except (redis.RedisError, OSError) as error:
            self._breaker.failed()
            if not self._logged:
                self._logged = True
                log.warning("the server of shared features does not answer: %s (further ones are not logged)", error)
            return None
        if self._breaker.succeeded():
            self._logged = False
        return answer


def open_shared_features(settings: RouterSettings) -> SharedFeatures | None:
    """Returns the cache that the settings name, or None."""
    if settings.features_remote_url is None:
        return None
    url = settings.features_remote_url.get_secret_value()
    return SharedFeatures(url, settings.features_remote_timeout_s, settings.features_remote_ttl_s)


def _key(identity: bytes) -> bytes:
    return b"triptych:features:" + identity.hex().encode()


def _encode(features: Features) -> bytes:
    about = json.dumps([features.dtype.str, features.shape]).encode()
    data = np.ascontiguousarray(features).tobytes()
    return b"".join((_PREFIX.pack(_MAGIC, len(about), zlib.crc32(data, zlib.crc32(about))), about, data))


def _decode(value: bytes) -> Features | None:
    """Returns what `_encode` wrote, or None when it is something else."""
    try:
        magic, length, checksum = _PREFIX.unpack_from(value)
        if magic != _MAGIC or zlib.crc32(memoryview(value)[_PREFIX.size :]) != checksum:
            return None
        kind, shape = json.loads(value[_PREFIX.size : _PREFIX.size + length])
        if kind not in _TYPES or len(shape) != 2:
            return None
        data = np.frombuffer(value, dtype=kind, offset=_PREFIX.size + length)
        return data.reshape(shape).copy()
    except (struct.error, ValueError, TypeError):
        return None
