"""Shared memory through which a Triton on the same host takes its input, in place of bytes in a message."""

import logging
from collections.abc import Sequence

import grpc
import numpy as np
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from triptych.tensors import create_shared
from triptych.vision.preprocess import Pixels

log = logging.getLogger(__name__)

_SMALLEST_BYTES = 1 << 20


class Region:
    """A piece of POSIX shared memory that Triton knows by name. Making one raises OSError where there is no room.

    Attributes:
        name: Both the object's name and what Triton calls it.
        size_bytes: Its length.
    """

    def __init__(self, size_bytes: int) -> None:
        self._memory = create_shared(size_bytes)
        self.name = self._memory.name.lstrip("/")
        self.size_bytes = size_bytes

    def write(self, images: Sequence[Pixels]) -> int:
        """Writes images of one shape one after the other and returns their bytes."""
        target: Pixels = np.ndarray((len(images), *images[0].shape), np.float32, self._memory.buf)
        for place, image in zip(target, images, strict=True):
            np.copyto(place, image)
        size_bytes = target.nbytes
        del target, place  # A view keeps the memory from being closed.
        return size_bytes

    def destroy(self) -> None:
        """Unmaps and unlinks it; Triton's own mapping lives until it is unregistered there."""
        self._memory.close()
        self._memory.unlink()


class SharedRegions:
    """The regions that one Triton knows, in use or free. As many as batches are in flight; a free one is used again.

    Where Triton cannot open them, because it runs on another host or in a container with a /dev/shm of its own, `take`
    gives None and the caller sends bytes, as where there is no room. Used from one event loop only.
    """

    def __init__(self, client: InferenceServerClient, timeout_s: float = 2.0) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._free: list[Region] = []
        self._used: set[Region] = set()
        self._refused = False

    @property
    def count(self) -> int:
        """Regions there are."""
        return len(self._free) + len(self._used)

    async def take(self, size_bytes: int) -> Region | None:
        """Returns a region of at least that size, the caller's until `give`; None where Triton takes none."""
        if self._refused:
            return None
        fitting = next((region for region in self._free if region.size_bytes >= size_bytes), None)
        if fitting is not None:
            self._free.remove(fitting)
            self._used.add(fitting)
            return fitting
        outgrown = self._free.pop() if self._free else None
        if outgrown is not None:
            await self._drop(outgrown)
        try:
            region = Region(max(_SMALLEST_BYTES, 1 << (size_bytes - 1).bit_length()))
        except OSError as error:
            log.info("no shared memory for %d bytes of pixels, so they are sent: %s", size_bytes, error.strerror)
            return None
        self._used.add(region)
        try:
            await self._client.register_system_shared_memory(
                region.name, f"/{region.name}", region.size_bytes, client_timeout=self._timeout_s
            )
        except (InferenceServerException, grpc.RpcError) as error:
            log.info("Triton takes no shared memory of ours, so pixels are sent to it: %s", error)
            self._refused = True
            self._discard(region)
            return None
        except BaseException:
            self._discard(region)
            raise
        return region

    def give(self, region: Region) -> None:
        """Takes a region back, whatever became of the call. A call that was given up may still read it; nobody looks
        at what that computes."""
        if region in self._used:
            self._used.remove(region)
            self._free.append(region)

    def forget(self) -> None:
        """Destroys the free regions without a word to Triton, which was restarted and knows none of them."""
        self._refused = False
        while self._free:
            self._free.pop().destroy()

    async def close(self) -> None:
        """Unregisters and destroys all regions."""
        for region in (*self._free, *self._used):
            await self._drop(region)
        self._free.clear()
        self._used.clear()

    async def _drop(self, region: Region) -> None:
        try:
            await self._client.unregister_system_shared_memory(region.name, client_timeout=self._timeout_s)
        except (InferenceServerException, grpc.RpcError) as error:
            log.debug("Triton did not unregister %s: %s", region.name, error)
        finally:
            region.destroy()

    def _discard(self, region: Region) -> None:
        self._used.discard(region)
        region.destroy()
