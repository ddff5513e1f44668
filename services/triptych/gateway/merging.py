"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields (index of the stream, item) as items come.

    The first failure is raised at once; then, or when the generator is closed, all streams are closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T]] = asyncio.Queue(maxsize=len(streams))

    async def drain(index: int, stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((index, item))

    tasks = [asyncio.create_task(drain(index, stream)) for index, stream in enumerate(streams)]
    everything = asyncio.gather(*tasks)
    try:
        while not (everything.done() and queue.empty()):
            taking = asyncio.ensure_future(queue.get())
            await asyncio.wait((taking, everything), return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                yield taking.result()
            else:
                taking.cancel()
        everything.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if everything.done() and not everything.cancelled():
            everything.exception()
