"""Places that can only be asked for: what comes late, is refused or is not answered."""

import asyncio

import pytest

from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.master.state.events import ExitCause, LauncherFailed
from elasticdl.places import polled, slurm
from elasticdl.places.base import Place, PlaceLost, PlaceState
from elasticdl.places.polled import End, PolledPlaces

OFTEN = 0.001  # seconds


class Queue:
    """A batch system that answers when the test lets it."""

    def __init__(self):
        self.places, self.ended, self.asked = {}, [], asyncio.Event()
        self.may_answer = asyncio.Event()
        self.answers = []  # instead of the usual, for the next requests to end a place
        self.loses_answers = False

    async def list(self):
        return dict(self.places)

    async def ask(self, avoid):
        self.asked.set()
        await self.may_answer.wait()
        number = str(len(self.places))
        self.places[number] = Place(number)
        if self.loses_answers:
            raise UnreachableError("no answer")
        return number

    async def end(self, place_id, *, at_once):
        self.ended.append((place_id, at_once))
        if self.answers:
            raise self.answers.pop()
        self.places[place_id] = End(ExitCause.DELETED, -9, "cancelled")


def story(told):
    """With places, their queue and what is reported of them."""

    async def whole():
        queue, reports = Queue(), []
        places = PolledPlaces(queue, reports.append, OFTEN)
        await places.found()
        async with asyncio.timeout(20):
            await told(places, queue, reports)
            await places.close()

    def test():
        asyncio.run(whole())

    test.__name__ = told.__name__
    return test


def left(queue):
    return [place for place in queue.places.values() if isinstance(place, Place)]


@story
async def test_a_place_that_is_being_asked_for_at_the_end_is_given_back(places, queue, reports):
    places.want(1, frozenset())
    await queue.asked.wait()
    closing = asyncio.ensure_future(places.close())
    await asyncio.sleep(0)
    queue.may_answer.set()
    await closing
    assert left(queue) == []
    assert isinstance(reports[-1], PlaceLost)


@story
async def test_a_place_of_which_the_answer_was_lost_at_the_end_is_given_back(places, queue, reports):
    queue.loses_answers = True
    places.want(1, frozenset())
    await queue.asked.wait()
    closing = asyncio.ensure_future(places.close())
    await asyncio.sleep(0)
    queue.may_answer.set()
    await closing
    assert len(queue.places) == 1
    assert left(queue) == []


@story
async def test_a_place_that_comes_when_nobody_wants_it_any_more_is_dropped(places, queue, reports):
    places.want(1, frozenset())
    await queue.asked.wait()
    places.want(0, frozenset())
    queue.may_answer.set()
    while not queue.ended:
        await asyncio.sleep(OFTEN)
    assert queue.ended == [("0", True)]


@story
async def test_to_end_a_place_is_tried_until_it_is_gone(places, queue, reports):
    queue.answers = [UserError("Zero Bytes were transmitted or received")]
    queue.places["7"] = Place("7", state=PlaceState.READY)
    while not reports:
        await asyncio.sleep(OFTEN)
    await places.close()
    assert queue.ended == [("7", False)] * 2


def test_of_a_place_that_ended_in_the_absence_of_a_master_the_next_hears_why():
    async def whole():
        reports = asyncio.Queue()
        queue = Queue()
        queue.places["7"] = End(ExitCause.PREEMPTED, -9, "for another job")
        places = PolledPlaces(queue, reports.put_nowait, OFTEN)
        assert list(await places.found()) == [Place("7", state=PlaceState.LOST)]
        places.want(0, frozenset())
        async with asyncio.timeout(20):
            assert await reports.get() == PlaceLost("7", ExitCause.PREEMPTED, -9, "for another job")
            await places.close()
        assert (reports.empty(), queue.ended) == (True, [])

    asyncio.run(whole())


def test_a_mistake_while_places_are_watched_is_told():
    class Wrong(Queue):
        async def ask(self, avoid):
            raise ZeroDivisionError("a mistake")

    async def whole():
        failed = asyncio.get_running_loop().create_future()
        places = PolledPlaces(Wrong(), failed.set_result, OFTEN)
        await places.found()
        places.want(1, frozenset())
        async with asyncio.timeout(20):
            assert await failed == LauncherFailed("places are watched no longer: ZeroDivisionError: a mistake")
        await places.detach()

    asyncio.run(whole())


def test_places_that_stay_do_not_fail_a_job_that_has_ended(monkeypatch, caplog):
    monkeypatch.setattr(polled, "CLOSE_SECONDS", 0.01)

    async def whole():
        queue = Queue()
        queue.places["7"] = Place("7", state=PlaceState.READY)
        queue.answers = [UnreachableError("no answer")] * 1000
        places = PolledPlaces(queue, lambda event: None, OFTEN)
        await places.found()
        await places.close()

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
