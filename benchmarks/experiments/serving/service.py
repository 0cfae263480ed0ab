"""The serving side at work: all requests at their time, whatever became of those before (an open loop), and what happened.

What the autoscaler decides follows from when requests are due, and is done at its time.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any, Self, TypeVar

from kubernetes import client

from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.measures import Change
from benchmarks.experiments.pods import Pods, PodWatch
from benchmarks.experiments.serving.demand import Autoscaler, LoadPlan, Scaling, requests_of, scalings
from benchmarks.experiments.serving.frontend import Frontend, new_session, ready_addresses
from benchmarks.experiments.serving.server import PIXELS
from benchmarks.processes import Failed, wait_until
from elasticdl.common.errors import ElasticDLError

IMAGES = 16
ENDING_SECONDS = 10.0
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Request:
    """``latency`` counts from when it was due, whether or not it could be sent then; ``failure`` is empty if there was none."""

    time: float
    latency: float
    replica: str
    refused: int
    answer: int | None
    failure: str


@dataclass(slots=True)
class Records:
    """What has happened so far; ``clock`` counts from the load's beginning. ``rotations``: replicas that take requests."""

    clock: Callable[[], float] = lambda: 0.0
    requests: list[Request] = field(default_factory=list)
    rotations: list[Change] = field(default_factory=list)
    scalings: list[Scaling] = field(default_factory=list)

    def rotation(self, replicas: int) -> None:
        self.rotations.append(Change(self.clock(), "rotation", replicas))

    def write(self, artefacts: Artefacts) -> None:
        columns = [each.name for each in fields(Request)]
        artefacts.table("requests", columns, map(astuple, self.requests))
        artefacts.table("rotation", ("time", "replicas"), [(each.time, each.gpus) for each in self.rotations])
        artefacts.text("scalings.jsonl", "".join(f"{json.dumps(asdict(each))}\n" for each in self.scalings))


@dataclass(frozen=True, slots=True)
class Load:
    """``clock``: seconds since the load's beginning; ``scale`` blocks, and raises what then ends the load."""

    plan: LoadPlan
    autoscaler: Autoscaler
    scale: Callable[[int], None]
    clock: Callable[[], float]

    async def play(self, frontend: Frontend, records: Records) -> None:
        """To the curve's end, and until every request has its reply."""
        images = Images(self.plan.seed)
        due = requests_of(self.plan, self.autoscaler.rule.per_replica)
        decided = scalings(self.plan, self.autoscaler)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._scale(list(decided), records))
            for time in due:
                await asyncio.sleep(time - self.clock())
                tasks.create_task(self._request(time, images, frontend, records))
            await asyncio.sleep(self.plan.curve.end - self.clock())

    async def _scale(self, decided: Sequence[Scaling], records: Records) -> None:
        """One after the other, so that they keep their order."""
        for scaling in decided:
            await asyncio.sleep(scaling.time - self.clock())
            records.scalings.append(scaling)
            await asyncio.to_thread(self.scale, scaling.replicas)

    async def _request(self, time: float, images: Images, frontend: Frontend, records: Records) -> None:
        number, image = images.draw()
        reply = await frontend.send(image)
        failure = reply.failure or images.objection(number, reply.answer)
        request = Request(time, self.clock() - time, reply.replica, reply.refused, reply.answer, failure)
        records.requests.append(request)


class Images:
    """What is sent; the same image has to get the same answer from every replica."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"images {seed}")
        self._images = [self._rng.randbytes(PIXELS) for _ in range(IMAGES)]
        self._answers: dict[int, int] = {}

    def draw(self) -> tuple[int, bytes]:
        number = self._rng.randrange(len(self._images))
        return number, self._images[number]

    def objection(self, number: int, answer: int | None) -> str:
        if answer is None:
            return ""
        first = self._answers.setdefault(number, answer)
        return "" if answer == first else f"class {answer}, where the first answer was {first}"


class Service(PodWatch):
    """Sends requests while its context lasts."""

    def __init__(self, core: client.CoreV1Api, namespace: str, app: str, port: int, records: Records) -> None:
        super().__init__(core, namespace)
        self._app = app
        self._port = port
        self._records = records
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._looks: dict[str, asyncio.Task[None]] = {}  # at the health of a replica, by its address

    def __enter__(self) -> Self:
        self._thread.start()
        self._session, self._frontend = self._submit(self._open()).result(ENDING_SECONDS)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._submit(self._close()).result(ENDING_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ENDING_SECONDS)
        self._loop.close()

    def wait_for_replicas(self, replicas: int, seconds: float, alive: Callable[[], None]) -> None:
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
        except* (ElasticDLError, Failed) as failures:  # of its tasks
            raise Failed(str(failures.exceptions[0])) from failures
        finally:
            playing.cancel()

    def see(self, pods: Pods) -> None:
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
