"""Places as jobs of Slurm: what its states mean, and a launcher whose workers are started by agents in such jobs."""

import asyncio
import os
import shlex
import signal
from contextlib import asynccontextmanager
from functools import partial

import pytest
from agent_kit import TOKEN, acting
from slurm_kit import FakeSlurm

from elasticdl.common.environment import WorkerEnvironment
from elasticdl.master.state.events import ExitCause, LauncherFailed, WorkerExited, WorkerPending, WorkerPlaced
from elasticdl.places.base import PlaceChanged, PlaceLost, PlaceState
from elasticdl.places.batch_system import BatchPlaces
from elasticdl.places.launcher import PlaceLauncher
from elasticdl.places.slurm import Slurm

DEADLINE = 60.0
NOWHERE = frozenset()


@asynccontextmanager
async def places_of(slurm, folder, **options):
    reports = asyncio.Queue()
    jobs = Slurm("elasticdl-digits", {}, folder, run=slurm, **options)
    places = BatchPlaces(jobs, reports.put_nowait, poll_seconds=0.01)
    await places.found()

    async def report(kind):
        """The next of this kind."""
        while not isinstance(told := await asyncio.wait_for(reports.get(), DEADLINE), kind):
            pass
        return told

    yield places, report
    await places.detach()


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("PREEMPTED", ExitCause.PREEMPTED),
        ("TIMEOUT", ExitCause.PREEMPTED),
        ("NODE_FAIL", ExitCause.NODE_LOST),
        ("CANCELLED", ExitCause.DELETED),
        ("OUT_OF_MEMORY", ExitCause.OUT_OF_MEMORY),
        ("FAILED", ExitCause.KILLED),
        ("A_STATE_OF_A_LATER_SLURM", ExitCause.KILLED),
    ],
)
def test_why_a_place_is_lost(tmp_path, state, cause):
    async def story():
        slurm = FakeSlurm(1)
        async with places_of(slurm, tmp_path) as (places, report):
            places.want(1, 1, NOWHERE)
            while (await report(PlaceChanged)).place.state is not PlaceState.READY:
                pass
            slurm.jobs["100"] = state
            lost = await report(PlaceLost)
            assert (lost.place_id, lost.cause) == ("100", cause)
            assert state.lower() in lost.detail

    asyncio.run(story())


def test_a_job_that_slurm_will_never_take_is_told_once_and_not_tried_again(tmp_path):
    async def story():
        slurm = FakeSlurm(1)
        slurm.problem = "sbatch: error: Batch job submission failed:\n Invalid partition name specified\n"
        async with places_of(slurm, tmp_path, slurm_args=shlex.split("-p 'no such'")) as (places, report):
            places.want(1, 1, NOWHERE)
            failed = await report(LauncherFailed)
            assert failed.reason.endswith("Batch job submission failed: Invalid partition name specified")
            places.want(1, 2, NOWHERE)
            await asyncio.sleep(0)
            (arguments,) = slurm.submitted
            assert arguments[-3:-1] == ["-p", "no such"]
            assert {"--no-requeue", "--signal=B:TERM@120"} < set(arguments)

    asyncio.run(story())


def test_a_controller_that_is_away_is_asked_again(tmp_path):
    async def story():
        slurm = FakeSlurm(1)
        slurm.problem = "sbatch: error: Unable to contact slurm controller (connect failure)"
        async with places_of(slurm, tmp_path) as (places, report):
            places.want(1, 1, NOWHERE)
            while not slurm.submitted:
                await asyncio.sleep(0)
            slurm.problem = ""
            assert (await report(PlaceChanged)).place.id == "100"

    asyncio.run(story())


def test_workers_start_in_jobs_of_slurm_and_one_that_is_preempted_leaves_before(tmp_path):
    async def story():
        slurm = FakeSlurm(2, really=True)
        async with acting(tmp_path) as scene:
            master, reports = await scene.master(), asyncio.Queue()
            worker = WorkerEnvironment(f"127.0.0.1:{master.port}", TOKEN, 0, str(tmp_path / "job.json"))
            own = {"WORK": str(tmp_path), "PYTHONPATH": str(tmp_path / "packages"), "ELASTICDL_HOST": ""}
            jobs = Slurm("elasticdl-digits", {**os.environ, **worker.to_env(), **own}, tmp_path, run=slurm)
            make_places = partial(BatchPlaces, jobs, poll_seconds=0.01)
            launcher = PlaceLauncher(make_places, master.agents.reporting_to, reports.put_nowait)

            async def report(kind):
                while isinstance(told := await asyncio.wait_for(reports.get(), DEADLINE), WorkerPending):
                    pass
                assert isinstance(told, kind), told
                return told

            await launcher.find()
            for worker_id in (0, 1, 2):
                await launcher.launch(worker_id)
            for worker_id in sorted([(await report(WorkerPlaced)).worker_id for _ in range(2)]):
                await scene.up(worker_id)
            slurm.end("100", "PREEMPTED", signal.SIGTERM)
            exited = await report(WorkerExited)
            assert (exited.cause, exited.output.splitlines()[-1]) == (ExitCause.PREEMPTED, "told to leave")
            assert (await report(WorkerPlaced)).node == "node-1"
            await launcher.close()
            assert {(await report(WorkerExited)).worker_id for _ in range(2)} == {0, 1, 2} - {exited.worker_id}
            assert {await asyncio.to_thread(process.wait) for process in slurm.processes.values()} <= {0, 143}

    asyncio.run(story())
