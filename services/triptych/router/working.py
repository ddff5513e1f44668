"""Work of one request in threads and in several tasks."""

import asyncio
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


async def in_thread(threads: ThreadPoolExecutor, function: Any, *arguments: Any) -> Any:
    """Runs a function in a thread; when the caller is cancelled before its turn, it never runs."""
    return await asyncio.get_running_loop().run_in_executor(threads, function, *arguments)


async def run_all(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs all concurrently; the first failure cancels the rest, waits for their end, and is raised as itself."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
