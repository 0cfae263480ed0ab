"""Slots of this machine: which GPUs a place has, and who else may have them; and places that can only be asked for."""

import asyncio
import itertools
from contextlib import asynccontextmanager
from functools import partial

import pytest
from cli_kit import scene_in
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.common.credentials import SHARED_GPU
from elasticdl.common.errors import UnreachableError
from elasticdl.master.core.events import ExitCause
from elasticdl.places import local, polled
from elasticdl.places.base import Place, PlaceLost, PlaceState
from elasticdl.places.local import Slots, find_gpus
from elasticdl.places.polled import PolledPlaces
from tests.contract.places_kit import NOWHERE, FakeProvider, PlacesBench, bench_of
from tests.stories import on

GPUS = ["GPU-a", "GPU-b"]
FOUR = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
LISTING = """GPU 0: NVIDIA H200 (UUID: GPU-a47f)
  MIG 1g.18gb     Device  0: (UUID: MIG-x9d2)
  MIG 1g.18gb     Device  1: (UUID: MIG-y306)
GPU 1: NVIDIA H200 (UUID: GPU-b81c)
"""
OTHERS_HAVE_ALL = "every GPU is taken, some by other jobs of yours"


class JobOfSlots(PlacesBench):
    """A job's slots, and what is known of them; they report at once."""

    def want(self, most):
        self.places.want(most, frozenset())
        return self.taken()

    def give_back(self, index):
        self.taken().places.give_back(self.ready()[index], at_once=False)

    def taken(self):
        self.places._try_again()
        while not self.nothing_more():
            self.take(self.reports.get_nowait())
        return self

    @property
    def visible(self):
        """The GPUs of each that is ready, in the order in which they have become so."""
        return [self.now[each].environment.get("CUDA_VISIBLE_DEVICES") for each in self.taken().ready()]

    @property
    def reasons(self):
        return [self.now[each].reason for each in self.taken().waiting()]


@asynccontextmanager
async def jobs(tmp_path):
    """A maker of jobs; what it has made is closed."""
    made = []

    def make(count, gpus, locks=tmp_path, **more):
        made.append(JobOfSlots(partial(Slots, count, gpus, locks, **more)))
        return made[-1]

    yield make
    for job in made:
        await job.places.close()


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Makes a program of the driver's, given as a script."""
    with scene_in(tmp_path, monkeypatch) as scene:
        yield lambda script: scene.program(f"nvidia-smi {script}")


@pytest.mark.parametrize(
    ("count", "gpus", "more", "want", "visible", "reasons"),
    [
        (0, [], {}, 50, [None] * 50, []),
        (0, GPUS, {}, 3, GPUS, ["every GPU is taken (2)"]),
        (1, GPUS, {}, 2, ["GPU-a"], ["every slot is taken (1)"]),
        (3, GPUS, {}, 4, ["GPU-a", "GPU-b", "GPU-a"], ["every slot is taken (3)"]),
        (0, FOUR, {"gpus_per_slot": 2}, 3, ["GPU-a,GPU-b", "GPU-c,GPU-d"], ["every GPU is taken (4)"]),
        (0, GPUS, {"gpus_per_slot": 4}, 1, [], ["a worker needs 4 GPUs, and there are 2"]),
    ],
    ids=["no GPUs", "one each", "fewer slots", "more slots share", "several", "too many"],
)
@on(jobs)
async def test_a_slot_has_gpus_of_its_own_as_far_as_there_are_any(make, count, gpus, more, want, visible, reasons):
    job = make(count, gpus, **more).want(want)
    assert (job.visible, job.reasons) == (visible, reasons)
    told = {job.now[each].environment.get(SHARED_GPU) for each in job.ready()}
    assert told == ({"1"} if visible.count("GPU-a") > 1 else {None} if visible else set()), "all, if any shares one"
    if gpus and visible:
        job.give_back(0)
        assert job.visible == [*visible[1:], visible[0]], "who waits has it next"


@on(jobs)
async def test_two_jobs_never_share_a_gpu_by_accident_and_what_one_gives_back_the_other_finds_in_time(
    make, monkeypatch
):
    monkeypatch.setattr(local, "RETRY_SECONDS", 0.01)
    mine, other = make(1, GPUS).want(1), make(0, GPUS).want(2)
    assert (other.visible, other.reasons) == (["GPU-b"], [OTHERS_HAVE_ALL])
    mine.give_back(0)
    await other.has(ready=2)
    assert other.visible == ["GPU-b", "GPU-a"]


@on(jobs)
async def test_only_jobs_that_share_gpus_share_them_with_others(make):
    first, second = make(2, ["GPU-a"]).want(2), make(2, ["GPU-a"]).want(1)
    alone = make(0, ["GPU-a"]).want(1)
    assert (first.visible, second.visible) == (["GPU-a", "GPU-a"], ["GPU-a"])
    assert alone.reasons == [OTHERS_HAVE_ALL]
    for job, index in ((first, 1), (first, 0), (second, 0)):
        job.give_back(index)
    assert alone.taken().visible == ["GPU-a"]
    assert first.want(1).reasons == [OTHERS_HAVE_ALL]


@on(jobs)
async def test_a_folder_that_takes_no_leases_is_a_reason_to_wait(make, tmp_path):
    (tmp_path / "file").write_text("")
    locks = tmp_path / "file" / "locks"
    assert make(0, GPUS, locks).want(1).reasons == [f"can't lease a GPU in {locks}: Not a directory"]


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        (None, ["GPU-a47f", "GPU-b81c"]),
        ("GPU-b81c,0", ["GPU-b81c", "GPU-a47f"]),
        ("1,-1,0", ["GPU-b81c"]),
        ("", []),
        ("GPU-b8,gpu-A47", ["GPU-b81c", "GPU-a47f"]),
        ("1,GPU-,0", ["GPU-b81c"]),
        ("MIG-x9d2", ["MIG-x9d2"]),
    ],
)
def test_only_gpus_that_the_user_may_see_are_used(driver, devices, found):
    driver(f"echo '{LISTING}'")
    assert find_gpus({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}) == found


@on(jobs)
async def test_a_gpu_is_the_same_one_however_its_name_is_spelt_which_may_be_no_name_of_a_file(make, driver):
    driver(f"echo '{LISTING}'")
    assert make(0, find_gpus({"CUDA_VISIBLE_DEVICES": "0"})).want(1).visible == ["GPU-a47f"]
    assert make(0, find_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a47f"})).want(1).reasons == [OTHERS_HAVE_ALL]
    slices = ["MIG-GPU-a/1/0", "MIG-GPU-a/2/0"]
    assert [make(1, slices).want(1).visible, make(0, slices).want(1).visible] == [slices[:1], slices[1:]]


@pytest.mark.parametrize(("script", "why"), [("exit 9", "exit status 9"), ("exec /bin/sleep 600", "timed out")])
def test_a_driver_that_does_not_answer_counts_as_none_and_is_told(driver, monkeypatch, caplog, script, why):
    driver(script)
    monkeypatch.setattr(local, "QUERY_SECONDS", 0.5)
    assert find_gpus({}) == []
    assert why in caplog.text


# ---- places that can only be asked for: what comes late, is refused or is not answered ----

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


def test_a_place_that_was_asked_for_without_an_answer_is_ended_with_the_others():
    async def run():
        provider = FakeProvider(ROOM, itertools.repeat("fine"))
        asks = provider.ask

        async def ask(avoid):
            await asks(avoid)
            raise UnreachableError("no answer")

        provider.ask = ask
        async with bench_of(partial(PolledPlaces, provider, seconds=0.05)) as bench:
            bench.places.want(1, NOWHERE)
            while not provider.places:
                await asyncio.sleep(0)
        assert provider.live() == []

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_place_that_is_to_end_at_once_while_it_is_being_ended_with_some_grace_does(monkeypatch):
    async def run():
        provider, told = FakeProvider(ROOM, itertools.repeat("fine")), []

        async def end(place_ids, *, at_once):
            told.append(at_once)
            if at_once:
                provider.lose(*place_ids)
            bench.places.give_back(*place_ids, at_once=True)

        provider.end = end
        async with bench_of(partial(PolledPlaces, provider, seconds=OFTEN)) as bench:
            await bench.become_ready(1)
            bench.places.want(0, NOWHERE)
            bench.places.give_back("0", at_once=False)
            await bench.until(lambda bench: bench.lost)
        assert told == [False, True]

    monkeypatch.setattr(polled, "CLOSE_SECONDS", 0.01)
    asyncio.run(asyncio.wait_for(run(), 20))


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
