"""Slots of this machine: which GPUs a place has, and who else may have them."""

import asyncio
import subprocess
from contextlib import asynccontextmanager

import pytest

from elasticdl.common.environment import SHARED_GPU
from elasticdl.places import slots
from elasticdl.places.base import PlaceChanged, PlaceLost, PlaceState
from elasticdl.places.slots import Slots, find_gpus

GPUS = ["GPU-a", "GPU-b"]
FOUR = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
LISTING = "GPU 0: NVIDIA H200 (UUID: GPU-a)\n  MIG 1g.18gb Device 0: (UUID: MIG-x)\nGPU 1: NVIDIA H200 (UUID: GPU-b)\n"
OTHERS_HAVE_ALL = "every GPU is taken, some by other jobs of yours"


class Job:
    """A job's slots, and what is known of them."""

    def __init__(self, count, gpus, locks, **more):
        self.places, self.lost = {}, []
        self.slots = Slots(count, gpus, locks, self.take, **more)

    def take(self, report):
        match report:
            case PlaceChanged(place):
                self.places[place.id] = place
            case PlaceLost(place_id):
                self.lost.append(place_id)
                self.places.pop(place_id, None)

    def want(self, most):
        self.slots.want(most, frozenset())
        return self

    def in_state(self, state):
        return [place for place in self.places.values() if place.state is state]

    @property
    def visible(self):
        return [place.environment.get("CUDA_VISIBLE_DEVICES") for place in self.in_state(PlaceState.READY)]

    @property
    def reasons(self):
        return [place.reason for place in self.in_state(PlaceState.WAITING)]

    def give_back(self, index):
        self.slots.give_back(self.in_state(PlaceState.READY)[index].id, at_once=False)


@pytest.fixture
def jobs(tmp_path):
    """Runs a story with a maker of jobs, and closes what it has made."""

    @asynccontextmanager
    async def maker():
        made = []

        def make(count, gpus, locks=tmp_path, **more):
            made.append(Job(count, gpus, locks, **more))
            return made[-1]

        yield make
        for job in made:
            await job.slots.close()

    def run(story):
        async def whole():
            async with maker() as make:
                story(make)

        asyncio.run(whole())

    return run


def test_without_gpus_slots_are_as_many_as_wanted(jobs):
    @jobs
    def story(make):
        job = make(0, []).want(50)
        assert job.visible == [None] * 50


def test_a_gpu_holds_one_worker(jobs):
    @jobs
    def story(make):
        job = make(0, GPUS).want(3)
        assert (job.visible, job.reasons) == (GPUS, ["every GPU is taken (2)"])
        job.give_back(0)
        assert (job.visible, job.reasons) == (["GPU-b", "GPU-a"], [])


def test_fewer_slots_than_gpus(jobs):
    @jobs
    def story(make):
        job = make(1, GPUS).want(2)
        assert (job.visible, job.reasons) == (["GPU-a"], ["every slot is taken (1)"])


def test_two_jobs_never_share_a_gpu_by_accident(jobs):
    @jobs
    def story(make):
        mine, other = make(1, GPUS).want(1), make(0, GPUS).want(2)
        assert (other.visible, other.reasons) == (["GPU-b"], [OTHERS_HAVE_ALL])
        mine.give_back(0)
        other.slots._try_again()
        assert other.visible == ["GPU-b", "GPU-a"]


def test_a_gpu_that_another_job_gives_back_is_found_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "RETRY_SECONDS", 0.01)

    async def run():
        got = asyncio.Event()
        mine = Job(0, GPUS, tmp_path).want(2)
        other = Slots(0, GPUS, tmp_path, lambda report: report.place.state is PlaceState.READY and got.set())
        other.want(1, frozenset())
        mine.give_back(0)
        await asyncio.wait_for(got.wait(), 30)

    asyncio.run(run())


def test_a_worker_with_several_gpus_has_all_of_them_or_none(jobs):
    @jobs
    def story(make):
        job = make(0, FOUR, gpus_per_slot=2).want(3)
        assert (job.visible, job.reasons) == (["GPU-a,GPU-b", "GPU-c,GPU-d"], ["every GPU is taken (4)"])
        job.give_back(0)
        one, two = make(1, FOUR).want(1), make(0, FOUR, gpus_per_slot=2).want(1)
        assert (one.visible, two.visible, two.reasons) == ([], [], [OTHERS_HAVE_ALL])  # the third slot has them again
        job.want(2)
        job.give_back(1)
        one.slots._try_again()
        two.slots._try_again()
        assert (one.visible, two.visible, two.reasons) == (["GPU-a"], [], [OTHERS_HAVE_ALL])
        one.give_back(0)
        two.slots._try_again()
        assert two.visible == ["GPU-a,GPU-b"]


def test_a_worker_that_needs_more_gpus_than_there_are_says_so(jobs):
    @jobs
    def story(make):
        assert make(0, GPUS, gpus_per_slot=4).want(1).reasons == ["a worker needs 4 GPUs, and there are 2"]


def test_more_slots_than_gpus_share_them(jobs):
    @jobs
    def story(make):
        job = make(3, GPUS).want(4)
        assert (job.visible, job.reasons) == (["GPU-a", "GPU-b", "GPU-a"], ["every slot is taken (3)"])
        # also for the one that has a GPU to itself: all have to reduce in the same way
        assert {place.environment.get(SHARED_GPU) for place in job.in_state(PlaceState.READY)} == {"1"}
        job.give_back(1)
        assert job.visible == ["GPU-a", "GPU-a", "GPU-b"]


@pytest.mark.parametrize(("count", "gpus"), [(0, GPUS), (2, GPUS), (1, GPUS), (3, [])])
def test_who_has_a_gpu_to_itself_is_not_told_otherwise(jobs, count, gpus):
    @jobs
    def story(make):
        assert SHARED_GPU not in next(iter(make(count, gpus).want(1).places.values())).environment


def test_only_jobs_that_share_gpus_share_them_with_others(jobs):
    @jobs
    def story(make):
        first, second = make(2, ["GPU-a"]).want(2), make(2, ["GPU-a"]).want(1)
        alone = make(0, ["GPU-a"]).want(1)
        assert (first.visible, second.visible) == (["GPU-a", "GPU-a"], ["GPU-a"])
        assert alone.reasons == [OTHERS_HAVE_ALL]
        for job, index in ((first, 1), (first, 0), (second, 0)):
            job.give_back(index)
        alone.slots._try_again()
        assert alone.visible == ["GPU-a"]
        assert first.want(1).reasons == [OTHERS_HAVE_ALL]


def test_a_folder_that_takes_no_leases_is_a_reason_to_wait(jobs, tmp_path):
    (tmp_path / "file").write_text("")

    @jobs
    def story(make):
        locks = tmp_path / "file" / "locks"
        assert make(0, GPUS, locks).want(1).reasons == [f"can't lease a GPU in {locks}: Not a directory"]


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, GPUS),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["GPU-b"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-b,0"}, ["GPU-b", "GPU-a"]),
        ({"CUDA_VISIBLE_DEVICES": "7"}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,0"}, ["GPU-b"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_only_gpus_that_the_user_may_see_are_used(monkeypatch, environ, found):
    done = subprocess.CompletedProcess([], 0, stdout=LISTING)
    monkeypatch.setattr(slots.subprocess, "run", lambda *args, **more: done)
    assert find_gpus(environ) == found


def test_a_machine_without_driver_has_no_gpus(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_gpus({}) == []
    assert caplog.records == []


@pytest.mark.parametrize(("script", "why"), [("exit 9", "exit status 9"), ("exec sleep 600", "timed out")])
def test_a_driver_that_does_not_answer_counts_as_none_and_is_told(tmp_path, monkeypatch, caplog, script, why):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(slots, "QUERY_SECONDS", 0.5)
    assert find_gpus({}) == []
    assert why in caplog.text
