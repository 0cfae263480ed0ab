"""The serving side at work: a thread with the loop in which requests are sent, and a watch of the replicas' pods."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from kubernetes import client

from benchmarks.experiments.pods import Pods, PodWatch
from benchmarks.experiments.serving.load import Load
from benchmarks.experiments.serving.records import Records
from benchmarks.experiments.serving.requests import Frontend, new_session
from benchmarks.experiments.serving.rotation import ready_addresses
from benchmarks.processes import Failed, wait_until

ENDING_SECONDS = 10.0
Result = TypeVar("Result")


class Service:
    """Sends requests while its context lasts."""

    def __init__(self, core: client.CoreV1Api, namespace: str, app: str, port: int, records: Records) -> None:
        self._app = app
        self._port = port
        self._records = records
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._watch = PodWatch(core, namespace, self._become)
        self._looks: dict[str, asyncio.Task[None]] = {}  # at the health of a replica, by its address

    def __enter__(self) -> Self:
        self._thread.start()
        self._session, self._frontend = self._submit(self._open()).result(ENDING_SECONDS)
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        self._submit(self._close()).result(ENDING_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ENDING_SECONDS)
        self._loop.close()

    def wait_for(self, replicas: int, seconds: float, alive: Callable[[], None]) -> None:
        """Until so many are in rotation. ``alive`` raises if that is not to be expected any more.

        Raises:
            Failed: they are not in time.
        """

        def enough() -> bool:
            alive()
            return self._frontend.rotation.size >= replicas

        where = f"at port {self._port} of their pods (run this where pods' addresses can be reached, such as in a pod)"
        wait_until(enough, seconds, f"{replicas} replicas that answer {where}")

    def play(self, load: Load, alive: Callable[[], None], every: float) -> None:
        """Send all of it. ``alive`` is called now and then, and raises if it is of no use any more.

        Raises:
            Failed: the cluster did not scale the replicas.
        """
        playing = self._submit(load.play(self._frontend, self._records))
        try:
            while True:
                try:
                    return playing.result(every)
                except TimeoutError:
                    if playing.done():
                        raise
                    alive()
        except* Failed as failures:  # of its tasks
            raise Failed(str(failures.exceptions[0])) from failures
        finally:
            playing.cancel()

    # ---- in the watch's thread ----

    def _become(self, pods: Pods) -> None:
        self._loop.call_soon_threadsafe(self._place, ready_addresses(pods, self._app))

    # ---- in the loop's thread ----

    def _place(self, addresses: dict[str, str]) -> None:
        rotation, before = self._frontend.rotation, self._frontend.rotation.size
        for address in rotation.become(addresses):
            if address not in self._looks:
                self._looks[address] = self._loop.create_task(self._admit(address))
        if rotation.size != before:
            self._records.rotation(rotation.size)

    async def _admit(self, address: str) -> None:
        try:
            if await self._frontend.admit_when_healthy(address):
                self._records.rotation(self._frontend.rotation.size)
        finally:
            del self._looks[address]

    async def _open(self) -> tuple[Any, Frontend]:
        session = new_session()
        return session, Frontend(session, self._port)

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)
