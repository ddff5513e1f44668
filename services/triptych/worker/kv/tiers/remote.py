"""The remote tier: blocks on a server that speaks Redis's protocol, which workers on several hosts share."""

import logging
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import redis

from triptych.redis_server import RedisServer, describe, pack, unpack
from triptych.worker.kv.identity import BlockIdentity
from triptych.worker.kv.layout import BlockLayout
from triptych.worker.kv.tiers.tier import BlockBytes, TierBooks, Usage, modality

log = logging.getLogger(__name__)

_MAGIC = b"TRIPTKV\x01"
_BATCH = 8  # Blocks in one request: a slow server is noticed before many were asked for.
_SCAN = 512
_MOST_DROP_S = 10.0


class RemoteTier:
    """Blocks under keys that name layout and model, so that workers which differ in either do not see each other's.

    The server bounds its memory itself (`maxmemory` and an eviction policy); values expire after `ttl_s` without a
    hit. Each request has a deadline; after some failures in a row the server is left alone for a while. Absent or slow
    is a miss. Values are raw bytes with a checksum: nothing in them is ever executed.
    """

    name = "remote"
    knows = False

    def __init__(self, url: str, layout: BlockLayout, *, timeout_s: float, ttl_s: int) -> None:
        """Connects at the first use. Raises ValueError when the URL is none of redis://, rediss:// or unix://."""
        self._layout, self._ttl_s = layout, ttl_s
        self._server = RedisServer(url, timeout_s)
        self._books = TierBooks(self.name, log)
        self._stored = {"text": 0, "visual": 0}

    def contains(self, identity: BlockIdentity) -> bool:
        """Tells whether asking is worth it: whether the server answered lately. Only `get` knows more."""
        return self._server.is_worth_asking

    def covers(self, identities: Sequence[BlockIdentity]) -> int:
        """Asks the server how many leading blocks it has. Takes up to the timeout: not for the engine's thread."""
        if not identities:
            return 0
        answers = self._ask(lambda client: _pipelined(client, "exists", [self._key(one) for one in identities]))
        return next((n for n, found in enumerate(answers or [0]) if not found), len(identities))

    def put(self, blocks: Sequence[tuple[BlockIdentity, BlockBytes]]) -> int:
        """Sends blocks; see `Tier`."""
        stored = 0
        for start in range(0, len(blocks), _BATCH):
            batch = blocks[start : start + _BATCH]

            def send(client: "redis.Redis", batch: Sequence[tuple[BlockIdentity, BlockBytes]] = batch) -> bool:
                with client.pipeline(transaction=False) as pipeline:
                    for identity, data in batch:
                        pipeline.set(self._key(identity), _encode(identity, data), ex=self._ttl_s)
                    pipeline.execute()
                return True

            if self._ask(send, [identity for identity, _ in batch]) is None:
                break
            stored += len(batch)
            for identity, _ in batch:
                self._stored[modality(identity)] += self._layout.block_bytes
            self._books.count("store", (identity for identity, _ in batch))
        return stored

    def get(self, identities: Sequence[BlockIdentity], outs: Sequence[BlockBytes]) -> int:
        """Asks for leading blocks; see `Tier`."""
        found = 0
        while found < len(identities):
            batch = identities[found : found + _BATCH]
            keys = [self._key(identity) for identity in batch]
            values = self._ask(lambda client, keys=keys: client.mget(keys), batch)  # type: ignore[misc]
            for identity, value in zip(batch, values or [None], strict=False):
                if value is None or not self._decode(identity, value, outs[found]):
                    self._books.count("miss", [identity])
                    return found
                found += 1
                self._books.count("hit", [identity])
            self._ask(lambda client, keys=keys: _pipelined(client, "expire", keys, self._ttl_s))  # type: ignore[misc]
        return found

    def drop(self, doomed: Callable[[BlockIdentity], bool]) -> int:
        """Deletes doomed blocks after reading every block's identity, within some seconds; see `Tier`."""
        dropped = 0
        deadline_s = time.monotonic() + _MOST_DROP_S
        for keys in self._keys():
            heads = self._ask(lambda client, keys=keys: _pipelined(client, "getrange", keys, 0, 4095))  # type: ignore[misc]
            if heads is None or time.monotonic() > deadline_s:
                self._books.failed("dropping", "the server is too slow: some blocks stay until they expire")
                break
            gone = [key for key, head in zip(keys, heads, strict=True) if (one := _identity_of(head)) and doomed(one)]
            if gone:
                dropped += self._ask(lambda client, gone=gone: client.delete(*gone)) or 0  # type: ignore[misc]
        return dropped

    def identities(self) -> list[BlockIdentity]:
        """Returns nothing: what the server has is others' as well, and no list of it is kept."""
        return []

    def usage(self) -> Usage:
        """Returns what this worker sent and did since its start; what the server holds is the server's business."""
        return Usage(self._stored["text"], self._stored["visual"], 0, 0, self._books.counts())

    def check_integrity(self) -> None:
        """Does nothing: there are no books."""

    def close(self) -> None:
        """Closes the connections."""
        self._server.close()

    def _key(self, identity: BlockIdentity) -> bytes:
        return f"triptych:kv:{self._layout.digest}:".encode() + identity.key.hex().encode()

    def _keys(self) -> Iterator[list[bytes]]:
        cursor = 0
        while True:
            answer = self._ask(
                lambda client, cursor=cursor: client.scan(cursor, f"triptych:kv:{self._layout.digest}:*", _SCAN)  # type: ignore[misc]
            )
            if answer is None:
                return
            cursor, keys = answer
            if keys:
                yield keys
            if not cursor:
                return

    def _ask(self, request: "Callable[[redis.Redis], Any]", identities: Sequence[BlockIdentity] = ()) -> Any:
        """Returns the server's answer, or None when there is none or it was not asked."""
        return self._server.ask(
            request,
            lambda error: self._books.failed("asking the server", error, identities),
            lambda: self._books.recovered("asking the server"),
        )

    def _decode(self, identity: BlockIdentity, value: bytes, out: BlockBytes) -> bool:
        """Fills `out` from a stored value. Returns whether it is what it should be."""
        found = unpack(_MAGIC, value)
        if found is not None and len(found[1]) == out.nbytes and _identity_of(value) == identity:
            out[:] = np.frombuffer(found[1], dtype=np.uint8)
            return True
        self._books.failed("a value", "it is damaged", [identity])
        return False


def _encode(identity: BlockIdentity, data: BlockBytes) -> bytes:
    return pack(_MAGIC, [identity.key.hex(), identity.parent.hex(), identity.content.hex()], data.data)


def _identity_of(value: bytes) -> BlockIdentity | None:
    try:
        return BlockIdentity(*map(bytes.fromhex, describe(value)))
    except (struct.error, ValueError, TypeError):
        return None


def _pipelined(client: "redis.Redis", command: str, keys: Sequence[bytes], *arguments: Any) -> list[Any]:
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            getattr(pipeline, command)(key, *arguments)
        answers: list[Any] = pipeline.execute()
    return answers
