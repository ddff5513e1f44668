"""How much the router takes on at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from triptych.config import RouterSettings
from triptych.errors import IntegrityError, InvalidRequest, Overloaded
from triptych.v1 import inference_pb2


class Admission:
    """Counts requests in flight and the bytes of their encoded images; one too many is refused at once.

    A request's message, images included, lives as long as its call, so its bytes are booked as long.
    Used from one event loop only.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._max_requests = settings.max_inflight
        self._max_bytes = settings.max_inflight_image_bytes
        self._requests = 0
        self._bytes = 0
        self._pending = 0

    @property
    def requests(self) -> int:
        """Requests in flight."""
        return self._requests

    @property
    def pending(self) -> int:
        """Requests in flight that have not got their first token."""
        return self._pending

    @contextmanager
    def admit(self, image_bytes: int) -> Iterator[Callable[[], None]]:
        """Books a request for the length of the block; yields what to call, once or more, at its first token.

        Raises Overloaded when there is no room now, InvalidRequest (IMAGES_TOO_LARGE) when there never will be.
        """
        if image_bytes > self._max_bytes:
            raise InvalidRequest(
                f"the request's images have {image_bytes} bytes together, "
                f"more than max_inflight_image_bytes={self._max_bytes}",
                reason="IMAGES_TOO_LARGE",
            )
        if self._requests >= self._max_requests:
            raise Overloaded(f"max_inflight={self._max_requests} requests are in flight; try again later")
        if self._bytes + image_bytes > self._max_bytes:
            raise Overloaded(
                f"images in flight would exceed max_inflight_image_bytes={self._max_bytes}; try again later"
            )
        self._requests += 1
        self._bytes += image_bytes
        self._pending += 1
        waits = True

        def answered() -> None:
            nonlocal waits
            self._pending -= waits
            waits = False

        try:
            yield answered
        finally:
            answered()
            self._requests -= 1
            self._bytes -= image_bytes

    def check_integrity(self) -> None:
        """Raises IntegrityError unless no request in flight means no bytes in flight."""
        if self._requests < 0 or self._bytes < 0 or (self._requests == 0 and self._bytes != 0):
            raise IntegrityError(f"admission: {self._requests} requests hold {self._bytes} bytes")
        if not 0 <= self._pending <= self._requests:
            raise IntegrityError(f"admission: {self._pending} of {self._requests} requests wait for a first token")


def image_bytes_of(request: inference_pb2.GenerateRequest) -> int:
    """Returns the bytes of all images in a request, as sent (and a few for their framing)."""
    # ByteSize, because reading `data` would copy it.
    return sum(
        part.image.ByteSize() for message in request.messages for part in message.parts if part.HasField("image")
    )
