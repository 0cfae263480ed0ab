"""Pods as places, on the API server in memory, and the hands of who does something to them."""

import asyncio
import random
import threading
from contextlib import asynccontextmanager

from kubernetes_fake import FakeObjects, FakePods
from kubernetes_kit import JOB, PODS, RUNNING, pod

from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceState
from elasticdl.places.pod_places import PodPlaces, PodTimeouts

DEADLINE = 20.0
QUICK = PodTimeouts(
    image=0.05, explain=0.02, force=0.05, leave=0.05, close=5.0, start=0.3, first_retry=0.01, longest_retry=0.02
)


def name(number):
    return f"{JOB}-worker-{number}"


class Scene:
    def __init__(self, timeouts, workers):
        self.timeouts, self.workers = timeouts, workers
        self.objects = FakeObjects()
        self.pods = FakePods(self.objects)
        self.reports = asyncio.Queue()
        self.places = self.another()

    def another(self):
        return PodPlaces(self.pods, self.workers, self.reports.put_nowait, self.timeouts, random.Random(1))

    def want(self, most):
        self.places.want(most, frozenset())

    async def next(self, kind):
        """The next report, but for those which say only that a place is asked for."""
        report = await asyncio.wait_for(self.reports.get(), DEADLINE)
        if isinstance(report, PlaceChanged) and report.place == Place(report.place.id):
            return await self.next(kind)
        assert isinstance(report, kind), report
        return report

    async def changed(self, number, state):
        place = (await self.next(PlaceChanged)).place
        assert (place.id, place.state) == (name(number), state), place
        return place

    async def waits(self, number=0):
        return (await self.changed(number, PlaceState.WAITING)).reason

    async def lost(self, number=0):
        lost = await self.next((PlaceLost, PlaceChanged))
        if isinstance(lost, PlaceChanged):  # first it may be told that it ends
            assert lost.place.state is PlaceState.ENDING, lost
            lost = await self.next(PlaceLost)
        assert lost.place_id == name(number), lost
        return lost

    def give_back(self, number, *, at_once=True):
        self.places.give_back(name(number), at_once=at_once)

    async def called(self, *call, times=1):
        """Wait until a request was made so often."""

        def wait():
            with self.pods.called:
                return self.pods.called.wait_for(lambda: self.pods.calls.count(call) >= times, DEADLINE)

        assert await asyncio.to_thread(wait), self.pods.calls

    async def made(self, *numbers):
        async with asyncio.timeout(DEADLINE):
            while not {name(number) for number in numbers} <= self.objects.objects.keys():
                await asyncio.sleep(0)

    def show(self, number, phase="Running", state=RUNNING, **more):
        """The cluster sets the status of a worker's pod."""
        known = self.objects.objects[name(number)]
        made = pod(number, phase, state, manifest=known, **more)
        made["metadata"]["uid"] = known["metadata"]["uid"]
        self.objects.put(name(number), made)

    def remove(self, number):
        self.objects.put(name(number), self.objects.objects[name(number)], "DELETED")

    async def ready(self, count):
        self.want(count)
        for number in range(count):
            await self.made(number)
            self.show(number)
            await self.changed(number, PlaceState.READY)


@asynccontextmanager
async def pods_scene(timeouts=QUICK, workers=PODS, *, found=True):
    """``found``: what there is was asked for."""
    scene = Scene(timeouts, workers)
    try:
        if found:
            await scene.places.found()
        yield scene
    finally:
        await scene.places.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kubernetes")]
