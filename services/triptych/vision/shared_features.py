"""Features on a server that speaks Redis's protocol: what one router had encoded, no other one encodes."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from triptych.config import RouterSettings
from triptych.redis_server import RedisServer, pack, unpack

if TYPE_CHECKING:
    import redis

log = logging.getLogger(__name__)

Features = npt.NDArray[Any]

_MAGIC = b"TRIPTFE\x01"
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
        self._server = RedisServer(url, timeout_s)
        self._timeout_s, self._ttl_s = timeout_s, ttl_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="features")
        self._pending = 0
        self._logged = False

    async def get(self, identity: bytes) -> Features | None:
        """Returns the features of an image, [tokens, hidden_size], or None."""
        if not self._server.is_worth_asking:
            return None
        loop = asyncio.get_running_loop()
        look = loop.run_in_executor(self._threads, self._ask, lambda client: client.get(_key(identity)))
        try:
            # Connecting and asking have a timeout each, and threads may all be busy.
            value = await asyncio.wait_for(look, 2 * self._timeout_s)
        except TimeoutError:
            return None
        return None if value is None else _decode(value)

    def put_soon(self, identity: bytes, features: Features) -> None:
        """Sends features while nobody waits; leaves it when many are on their way already, or the server is gone."""
        if self._pending >= _MOST_PENDING or features.dtype.str not in _TYPES or not self._server.is_worth_asking:
            return
        self._pending += 1
        send = asyncio.get_running_loop().run_in_executor(self._threads, self._send, identity, features)
        send.add_done_callback(self._sent)

    def close(self) -> None:
        """Ends the threads and the connections."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._server.close()

    def _sent(self, _: object) -> None:
        self._pending -= 1

    # From here on: in the threads.

    def _send(self, identity: bytes, features: Features) -> None:
        self._ask(lambda client: client.set(_key(identity), _encode(features), ex=self._ttl_s))

    def _ask(self, request: "Callable[[redis.Redis], Any]") -> Any:
        """Returns the server's answer, or None when there is none or it was not asked."""
        return self._server.ask(request, self._failed, self._recovered)

    def _failed(self, error: Exception) -> None:
        if not self._logged:
            self._logged = True
            log.warning("the server of shared features does not answer: %s (further ones are not logged)", error)

    def _recovered(self) -> None:
        self._logged = False


def open_shared_features(settings: RouterSettings) -> SharedFeatures | None:
    """Returns the cache that the settings name, or None."""
    if settings.features_remote_url is None:
        return None
    url = settings.features_remote_url.get_secret_value()
    return SharedFeatures(url, settings.features_remote_timeout_s, settings.features_remote_ttl_s)


def _key(identity: bytes) -> bytes:
    return b"triptych:features:" + identity.hex().encode()


def _encode(features: Features) -> bytes:
    data = np.ascontiguousarray(features)
    return pack(_MAGIC, [features.dtype.str, features.shape], data.reshape(-1).view(np.uint8).data)


def _decode(value: bytes) -> Features | None:
    """Returns what `_encode` wrote, or None when it is something else."""
    found = unpack(_MAGIC, value)
    if found is None:
        return None
    try:
        kind, shape = found[0]
        if kind not in _TYPES or len(shape) != 2:
            return None
        return np.frombuffer(found[1], dtype=kind).reshape(shape).copy()
    except (ValueError, TypeError):
        return None
