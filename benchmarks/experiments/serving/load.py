"""All requests at their time, whatever became of those before (an open loop), and the autoscaler's looks in between.

Requests and looks are taken in the order in which they are due, and a look counts the requests that were due: so what the
autoscaler decides follows from the seed, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.experiments.serving.autoscaler import Autoscaler, rate_before
from benchmarks.experiments.serving.demand import Curve, arrivals
from benchmarks.experiments.serving.model import PIXELS
from benchmarks.experiments.serving.records import Records, Request, Scaling
from benchmarks.experiments.serving.requests import Frontend

IMAGES = 16


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """``every``: seconds between two looks of the autoscaler, at the rate within ``window``."""

    curve: Curve
    every: float
    window: float
    seed: int


def moments(plan: LoadPlan, per_replica: float) -> Iterator[tuple[float, bool]]:
    """When something is due, in order, and whether that is a request (else a look)."""
    requests = ((time, True) for time in arrivals(plan.curve, per_replica, random.Random(plan.seed)))
    looks = ((number * plan.every, False) for number in range(1, int(plan.curve.end / plan.every) + 1))
    return heapq.merge(requests, looks)


def scalings(plan: LoadPlan, autoscaler: Autoscaler) -> Iterator[Scaling]:
    """What the autoscaler will decide."""
    came: list[float] = []
    for time, is_request in moments(plan, autoscaler.rule.per_replica):
        if is_request:
            came.append(time)
        else:
            autoscaler, scaling = look(autoscaler, came, time, plan.window)
            if scaling:
                yield scaling


def look(
    autoscaler: Autoscaler, came: Sequence[float], time: float, window: float
) -> tuple[Autoscaler, Scaling | None]:
    rate = rate_before(came, time, window)
    after, reason = autoscaler.look(rate)
    return after, Scaling(time, rate, autoscaler.replicas, after.replicas, reason) if reason else None


@dataclass(frozen=True, slots=True)
class Load:
    """``clock``: seconds since the load's beginning; ``scale`` blocks, and raises what then ends the load."""

    plan: LoadPlan
    autoscaler: Autoscaler
    scale: Callable[[int], None]
    clock: Callable[[], float]

    async def play(self, frontend: Frontend, records: Records) -> None:
        """To the curve's end, and until every request has its reply."""
        images, came, autoscaler = Images(self.plan.seed), list[float](), self.autoscaler
        with ThreadPoolExecutor(1, "scale") as scaler:  # one, so that they keep their order
            async with asyncio.TaskGroup() as tasks:
                for time, is_request in moments(self.plan, autoscaler.rule.per_replica):
                    await asyncio.sleep(time - self.clock())
                    if is_request:
                        came.append(time)
                        tasks.create_task(self._request(time, images, frontend, records))
                        continue
                    autoscaler, scaling = look(autoscaler, came, time, self.plan.window)
                    if scaling:
                        records.scaling(scaling)
                        loop = asyncio.get_running_loop()
                        tasks.create_task(_done(loop.run_in_executor(scaler, self.scale, scaling.replicas)))
                await asyncio.sleep(self.plan.curve.end - self.clock())

    async def _request(self, time: float, images: Images, frontend: Frontend, records: Records) -> None:
        number, image = images.draw()
        reply = await frontend.send(image)
        failure = reply.failure or images.objection(number, reply.answer)
        request = Request(time, self.clock() - time, reply.replica, reply.refused, reply.answer, failure)
        records.request(request)


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


async def _done(future: asyncio.Future[None]) -> None:
    await future
