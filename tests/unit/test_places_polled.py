"""Places that can only be asked for: what comes late, is refused or is not answered."""

import asyncio
import itertools
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.master.core.events import ExitCause
from elasticdl.places import polled
from elasticdl.places.base import Place, PlaceLost, PlaceState
from elasticdl.places.polled import PolledPlaces
from tests.contract.places_kit import NOWHERE, FakeProvider, bench_of

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


def test_the_next_master_hears_why_a_place_has_ended_and_one_that_stays_does_not_fail_a_job_that_has_ended(
    monkeypatch, caplog
):
    monkeypatch.setattr(polled, "CLOSE_SECONDS", 0.01)
    lost = PlaceLost("7", ExitCause.PREEMPTED, -9, "for another job")

    async def run():
        provider, reports = FakeProvider(ROOM, itertools.repeat("fine")), asyncio.Queue()
        provider.places = {"7": lost, "8": None}
        places = PolledPlaces(provider, reports.put_nowait, OFTEN)
        assert Place("7", state=PlaceState.LOST) in await places.found()
        places.want(1, NOWHERE)
        assert await reports.get() == lost
        provider._answers = itertools.repeat("is not heard")
        await places.close()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert "places 8 have not ended" in caplog.text
