"""Places that can only be asked for: what comes late, is refused or is not answered."""

import asyncio
import itertools
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.common.errors import UnreachableError
from elasticdl.master.core.events import ExitCause
from elasticdl.places import polled
from elasticdl.places.base import Place, PlaceLost, PlaceState
from elasticdl.places.polled import PolledPlaces
from tests.contract.places_kit import NOWHERE, FakeProvider, bench_of
from tests.stories import on

OFTEN = 0.001  # seconds
ROOM = 2
HAPPENS = st.sampled_from(["want 0", "want 1", "want 3", "give back", "give back at once", "lost", "nothing"])
ANSWERS = st.sampled_from(["fine", "fine", "is not heard", "is done without an answer"])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(HAPPENS, st.integers(0, 3)), max_size=12), st.lists(ANSWERS, max_size=12), st.booleans())
def test_whatever_becomes_of_requests_as_many_places_come_as_are_wanted_and_none_stays(history, answers, settles):
    """`PlacesBench` sees that none is lost twice, or changes when it is lost."""

    async def run():
        provider, most = FakeProvider(ROOM, answers), 0
        async with asyncio.timeout(30), bench_of(partial(PolledPlaces, provider, seconds=OFTEN)) as bench:
            for happens, passes in history:
                first = min(bench.now, default="")
                if happens.startswith("want"):
                    most = int(happens[-1])
                    bench.places.want(most, NOWHERE)
                elif happens == "lost" and provider.live():
                    provider.lose(provider.live()[0])
                elif happens.startswith("give back"):
                    bench.places.give_back(first, at_once=happens.endswith("once"))
                await asyncio.sleep(passes * OFTEN)
                while not bench.nothing_more():
                    bench.take(bench.reports.get_nowait())
            if settles:
                bench.places.want(max(most, ROOM), NOWHERE)
                await bench.until(lambda bench: len(bench.now) == max(most, ROOM) == len(provider.live()))
        assert provider.live() == []
        assert {each.detail for each in bench.lost.values()} <= {"as told", "its node has failed"}

    asyncio.run(run())


@asynccontextmanager
async def polled_places(there=()):
    """With whoever provides them; ``there``: what there is before."""
    made = SimpleNamespace(provider=FakeProvider(ROOM, itertools.repeat("fine")), reports=asyncio.Queue())
    made.provider.places.update(there)
    made.places = PolledPlaces(made.provider, made.reports.put_nowait, OFTEN)
    async with asyncio.timeout(20):
        made.found = list(await made.places.found())
        yield made
        await made.places.close()


def fails(error):
    async def fail(*asked, **how):
        raise error

    return fail


@on(partial(polled_places, {"7": PlaceLost("7", ExitCause.PREEMPTED, -9, "for another job")}))
async def test_of_a_place_that_ended_in_the_absence_of_a_master_the_next_hears_why(scene):
    assert scene.found == [Place("7", state=PlaceState.LOST)]
    scene.places.want(0, NOWHERE)
    assert await scene.reports.get() == PlaceLost("7", ExitCause.PREEMPTED, -9, "for another job")
    await scene.places.close()


def test_places_that_stay_do_not_fail_a_job_that_has_ended(monkeypatch, caplog):
    monkeypatch.setattr(polled, "CLOSE_SECONDS", 0.01)

    async def whole():
        async with polled_places({"7": None}) as opened:
            opened.provider.end = fails(UnreachableError("no answer"))

    asyncio.run(whole())
    assert "places 7 have not ended" in caplog.text
