"""Where the launcher's own work is done: requests in threads, tasks that end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class TaskRunner:
    """Made on an event loop, and closed on it."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kubernetes")
        self._tasks: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Do what blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def changed(self) -> None:
        self._change.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that only changes together with `changed`."""
        while not condition():
            self._change.clear()
            await self._change.wait()

    async def close(self) -> None:
        """End what is still being done; a request that is under way is waited for, and has its own time limit."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            task.get_loop().call_exception_handler({"message": "the launcher failed", "exception": error, "task": task})
