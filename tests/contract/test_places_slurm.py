"""Places of a real Slurm (`elasticdl.places.slurm`), in which a stand-in for the agent runs."""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from functools import partial

from places_kit import Bench, opened

from elasticdl.master.core.events import ExitCause, LauncherFailed
from elasticdl.places.polled import PolledPlaces
from elasticdl.places.slurm import SlurmProvider
from tests.slurm.fixtures import PROCESSORS
from tests.stories import on

pytest_plugins = ["tests.slurm.fixtures"]
# Says when it is told to leave, and then leaves.
AGENT = """
import signal, sys, time
def leave(number, frame):
    print("told to leave", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
time.sleep(300)
"""


@asynccontextmanager
async def on_slurm(slurm, tmp_path, monkeypatch, arguments=()):
    """With places of Slurm, none of which is left."""
    for name in ("PATH", "SLURM_CONF", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    provider = SlurmProvider(tmp_path.name, [sys.executable, str(agent)], f"{tmp_path}/%j.out", arguments)
    async with opened(Scene(provider)) as scene:
        yield scene
    assert slurm.run("squeue", "--noheader", f"--name={tmp_path.name}") == ""


class Scene(Bench):
    """The places of a master, and of its successor."""

    def __init__(self, provider):
        self.failures = []
        super().__init__(partial(PolledPlaces, provider))
        self._provider = provider

    def successor(self):
        return PolledPlaces(self._provider, self.reports.put_nowait)

    def take(self, report):
        if isinstance(report, LauncherFailed):
            self.failures.append(report.reason)
        else:
            super().take(report)


@on(on_slurm)
async def test_places_come_wait_and_are_dropped(scene, tmp_path):
    scene.places.want(PROCESSORS + 1, frozenset())
    await scene.has(ready=PROCESSORS, waiting=1)
    (waiting,) = scene.waiting()
    await scene.until(lambda scene: any(why in scene.now[waiting].reason for why in ("Resources", "Priority")))
    scene.places.want(PROCESSORS, frozenset())
    await scene.until(lambda scene: waiting in scene.lost)
    one = scene.ready()[0]
    scene.places.want(PROCESSORS - 1, frozenset())
    scene.places.give_back(one, at_once=False)
    await scene.until(lambda scene: one in scene.lost)
    assert scene.lost[one].cause is ExitCause.KILLED
    assert len(scene.ready()) == PROCESSORS - 1
    await scene.places.close()
    told = [each for each in tmp_path.glob("*.out") if "told to leave" in each.read_text()]
    assert len(told) == PROCESSORS, "each was told with SIGTERM, one when it was given back and two at the end"


@on(on_slurm)
async def test_another_master_finds_the_places_and_a_cancelled_one_is_told(scene, slurm):
    await scene.become_ready(2)
    await scene.places.close(keep=True)
    scene.places = scene.successor()
    found = await scene.places.found()
    gone, stays = sorted(scene.now)
    assert sorted(place.id for place in found) == [gone, stays]
    slurm.run("scancel", gone)
    await scene.until(lambda scene: gone in scene.lost)
    await scene.become_ready(2)
    assert scene.lost[gone].cause is ExitCause.DELETED
    assert stays in scene.now


@on(partial(on_slurm, arguments=("--partition=nowhere",)))
async def test_what_slurm_refuses_is_said_in_its_words(scene):
    scene.places.want(1, frozenset())
    await scene.until(lambda scene: scene.failures)
    assert scene.failures[0].startswith("Slurm refuses sbatch: ")
    assert "invalid partition" in scene.failures[0]


@on(on_slurm)
async def test_a_node_that_is_gone_takes_its_places(scene, slurm):  # the last: Slurm takes the node up when it likes
    await scene.become_ready(1)
    (place_id,) = scene.now
    scene.places.want(0, frozenset())
    slurm.run("scontrol", "update", f"nodename={scene.now[place_id].node}", "state=down", "reason=test")
    await scene.until(lambda scene: place_id in scene.lost)
    assert scene.lost[place_id].cause is ExitCause.NODE_LOST
