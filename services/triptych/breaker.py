"""Leaves a server alone that does not answer."""

import threading
import time

_FAILURES = 2
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class Breaker:
    """A circuit breaker: closed, requests pass; open, none does; after a pause, one at a time tries.

    It opens after two failures in a row; each further failure doubles the pause. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._open_until_s = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether a request would be tried now."""
        return self._failures < _FAILURES or time.monotonic() >= self._open_until_s

    def may_try(self) -> bool:
        """Tells whether to send a request; when the pause is over, only the first to ask may."""
        with self._lock:
            if self._failures < _FAILURES:
                return True
            now_s = time.monotonic()
            if now_s < self._open_until_s:
                return False
            self._open_until_s = now_s + self._pause_s
            return True

    def failed(self) -> None:
        """Notes that a request failed."""
        with self._lock:
            self._failures += 1
            if self._failures >= _FAILURES:
                self._open_until_s = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def succeeded(self) -> bool:
        """Notes that a request succeeded. Returns whether it ended a series of failures."""
        with self._lock:
            ended = self._failures > 0
            self._failures, self._pause_s = 0, _FIRST_PAUSE_S
            return ended
