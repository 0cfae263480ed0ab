"""Places that can only be asked for: what comes late, is refused or is not answered."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.master.core.events import ExitCause, LauncherFailed
from elasticdl.places import polled, slurm
from elasticdl.places.base import Place, PlaceLost, PlacesRefused, PlaceState
from elasticdl.places.polled import PolledPlaces
from tests.stories import on

OFTEN = 0.001  # seconds
NOWHERE = frozenset()


class Queue:
    """A batch system that answers when the test lets it."""

    def __init__(self):
        self.places, self.ended, self.asked = {}, [], asyncio.Event()
        self.may_answer = asyncio.Event()
        self.answers = []  # instead of the usual, for the next requests to end a place
        self.failure = None  # of what asks for a place, once it was done

    async def list(self):
        return dict(self.places)

    async def ask(self, avoid):
        self.asked.set()
        await self.may_answer.wait()
        number = str(len(self.places))
        self.places[number] = Place(number)
        if self.failure:
            raise self.failure
        return number

    async def end(self, place_ids, *, at_once):
        self.ended += [(place_id, at_once) for place_id in place_ids]
        if self.answers:
            raise self.answers.pop()
        self.places |= {each: PlaceLost(each, ExitCause.DELETED, -9, "cancelled") for each in place_ids}


@asynccontextmanager
async def scene(there=()):
    """Places that were found, their queue and what is reported of them; ``there``: what the queue has before."""
    queue, reports = Queue(), asyncio.Queue()
    queue.places.update(there)
    places = PolledPlaces(queue, reports.put_nowait, OFTEN)
    async with asyncio.timeout(20):
        yield SimpleNamespace(
            queue=queue, reports=reports, places=places, found=list(await places.found()), want=places.want
        )
        await places.close()
        await asyncio.sleep(0)
        rest = [reports.get_nowait() for _ in range(reports.qsize())]
        assert not [each for each in rest if isinstance(each, LauncherFailed)]


@pytest.mark.parametrize("failure", [None, UnreachableError("no answer")])
@on(scene)
async def test_a_place_that_is_being_asked_for_at_the_end_is_given_back(scene, failure):
    scene.queue.failure = failure
    scene.want(1, NOWHERE)
    await scene.queue.asked.wait()
    closing = asyncio.ensure_future(scene.places.close())
    await asyncio.sleep(0)
    scene.queue.may_answer.set()
    await closing
    assert [type(place) for place in scene.queue.places.values()] == [PlaceLost]


@on(scene)
async def test_a_place_that_comes_when_nobody_wants_it_any_more_is_dropped(scene):
    scene.want(1, NOWHERE)
    await scene.queue.asked.wait()
    scene.want(0, NOWHERE)
    scene.queue.may_answer.set()
    while not scene.queue.ended:
        await asyncio.sleep(OFTEN)
    assert scene.queue.ended == [("0", True)]


@on(scene)
async def test_to_end_a_place_is_tried_until_it_is_gone(scene):
    scene.queue.answers = [UnreachableError("Zero Bytes were transmitted or received")]
    scene.queue.places["7"] = Place("7", state=PlaceState.READY)
    await scene.reports.get()
    await scene.places.close()
    assert scene.queue.ended == [("7", False)] * 2


@on(scene)
async def test_a_place_that_can_not_be_ended_keeps_no_other_from_being_had(scene):
    scene.queue.may_answer.set()
    scene.queue.answers = [UnreachableError("no answer")] * 1000
    scene.queue.places["7"] = Place("7", state=PlaceState.READY)
    await scene.reports.get()
    scene.places.give_back("7", at_once=False)
    scene.want(1, NOWHERE)
    async with asyncio.timeout(10):
        await scene.queue.asked.wait()
    scene.queue.answers.clear()


@on(partial(scene, {"7": PlaceLost("7", ExitCause.PREEMPTED, -9, "for another job")}))
async def test_of_a_place_that_ended_in_the_absence_of_a_master_the_next_hears_why(scene):
    assert scene.found == [Place("7", state=PlaceState.LOST)]
    scene.want(0, NOWHERE)
    assert await scene.reports.get() == PlaceLost("7", ExitCause.PREEMPTED, -9, "for another job")
    await scene.places.close()
    assert (scene.reports.empty(), scene.queue.ended) == (True, [])


@on(scene)
async def test_a_mistake_while_places_are_watched_is_told(scene):
    scene.queue.failure = ZeroDivisionError("a mistake")
    scene.queue.may_answer.set()
    scene.want(1, NOWHERE)
    assert await scene.reports.get() == LauncherFailed("places are watched no longer: ZeroDivisionError: a mistake")
    await scene.places.close(keep=True)


@on(scene)
async def test_what_keeps_places_from_being_had_is_told_and_logged_once(scene, caplog):
    refusal = "Slurm does not answer: sbatch: Job violates accounting/QOS policy"
    tries, ask = [], scene.queue.ask

    async def refuse(avoid):
        tries.append(avoid)
        raise UnreachableError(refusal)

    scene.queue.may_answer.set()
    scene.queue.ask = refuse
    scene.want(2, NOWHERE)
    assert await scene.reports.get() == PlacesRefused(refusal)
    while len(tries) < 3:
        await asyncio.sleep(OFTEN)
    scene.queue.ask = ask
    first, second = (await scene.reports.get()).place, (await scene.reports.get()).place
    assert {first.id, second.id} == {"0", "1"}
    assert await scene.reports.get() == PlacesRefused("")
    assert [record.message for record in caplog.records] == [refusal]


def test_places_that_stay_do_not_fail_a_job_that_has_ended(monkeypatch, caplog):
    monkeypatch.setattr(polled, "CLOSE_SECONDS", 0.01)

    async def whole():
        async with scene({"7": Place("7", state=PlaceState.READY)}) as opened:
            opened.queue.answers = [UnreachableError("no answer")] * 1000

    asyncio.run(whole())
    assert "places 7 have not ended" in caplog.text


def test_what_slurm_says_of_its_queue_fails_no_job(monkeypatch):
    async def refused(*words):
        raise UserError("Slurm refuses squeue: slurm_load_jobs error: Zero Bytes were transmitted or received")

    async def printed(*words):
        return "squeue: a warning\n12|RUNNING|n1|None\n"

    provider = slurm.SlurmProvider("job", ("agent",), "out")
    monkeypatch.setattr(slurm, "ask", refused)
    with pytest.raises(UnreachableError, match="Zero Bytes"):
        asyncio.run(provider.list())
    monkeypatch.setattr(slurm, "ask", printed)
    assert asyncio.run(provider.list()) == {"12": Place("12", "n1", PlaceState.READY)}
