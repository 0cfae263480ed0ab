"""Places of a real Slurm (`elasticdl.places.slurm`), in which a stand-in for the agent runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from elasticdl.master.state.events import ExitCause, LauncherFailed
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceState
from elasticdl.places.polled import PolledPlaces
from elasticdl.places.slurm import SlurmProvider, slurm_places
from tests.slurm.fixtures import PROCESSORS

pytest_plugins = ["tests.slurm.fixtures"]
WITHIN_S = 60.0
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


class Watched:
    """What is reported of places, and what is known of them from that alone."""

    def __init__(self, provider: SlurmProvider) -> None:
        self._provider = provider
        self.places: dict[str, Place] = {}
        self.lost: dict[str, PlaceLost] = {}
        self.failures: list[str] = []
        self._news = asyncio.Event()

    def report(self, event: PlaceChanged | PlaceLost | LauncherFailed) -> None:
        match event:
            case PlaceChanged(place):
                assert place.id not in self.lost, "news of a place that is lost"
                self.places[place.id] = place
            case PlaceLost(place_id):
                assert place_id not in self.lost, "lost twice"
                self.lost[place_id] = event
                del self.places[place_id]
            case LauncherFailed(reason):
                self.failures.append(reason)
        self._news.set()

    def successor(self) -> PolledPlaces:
        """The places as the next master has them."""
        return slurm_places(self._provider, self.report)

    def in_state(self, state: PlaceState) -> list[str]:
        return [place.id for place in self.places.values() if place.state is state]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


Story = Callable[[PolledPlaces, Watched], Awaitable[None]]


@pytest.fixture
def play(slurm, tmp_path, monkeypatch):
    """Tells a story with places of Slurm, none of which is left."""
    for name in ("PATH", "SLURM_CONF", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, slurm.environment[name])
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)

    def played(story: Story, *arguments: str) -> Path:
        async def whole() -> None:
            command = [sys.executable, str(agent)]
            watched = Watched(SlurmProvider(tmp_path.name, command, f"{tmp_path}/%j.out", arguments))
            places = watched.successor()
            assert list(await places.found()) == []
            try:
                await story(places, watched)
            finally:
                await places.close()

        asyncio.run(whole())
        assert slurm.run("squeue", "--noheader", f"--name={tmp_path.name}") == ""
        return tmp_path

    return played


def test_places_come_wait_and_are_dropped(play):
    async def story(places, watched):
        places.want(PROCESSORS + 1, frozenset())
        await watched.until(lambda: len(watched.in_state(PlaceState.READY)) == PROCESSORS)
        (waiting,) = watched.in_state(PlaceState.WAITING)
        await watched.until(
            lambda: "Resources" in watched.places[waiting].reason or "Priority" in watched.places[waiting].reason
        )
        places.want(PROCESSORS, frozenset())
        await watched.until(lambda: waiting in watched.lost)
        one = watched.in_state(PlaceState.READY)[0]
        places.want(PROCESSORS - 1, frozenset())
        places.give_back(one, at_once=False)
        await watched.until(lambda: one in watched.lost)
        assert watched.lost[one].cause is ExitCause.KILLED
        assert len(watched.in_state(PlaceState.READY)) == PROCESSORS - 1

    folder = play(story)
    told = [each for each in folder.glob("*.out") if "told to leave" in each.read_text()]
    assert len(told) == PROCESSORS, "each was told with SIGTERM, one when it was given back and two at the end"


def test_a_job_of_higher_priority_takes_a_place_and_it_comes_back(play, slurm):
    async def story(places, watched):
        places.want(2, frozenset())
        await watched.until(lambda: len(watched.in_state(PlaceState.READY)) == 2)
        before = set(watched.places)
        urgent = slurm.run(
            "sbatch", "--parsable", "--partition=high", "--ntasks=3", "--output=/dev/null", "--wrap=sleep 120"
        )
        await watched.until(lambda: len(watched.lost) == 1)
        (lost,) = watched.lost.values()
        assert (lost.place_id in before, lost.cause, lost.detail) == (
            True,
            ExitCause.PREEMPTED,
            "preempted by a job of higher priority",
        )
        places.want(2, frozenset())
        await watched.until(lambda: len(watched.in_state(PlaceState.WAITING)) == 1)
        slurm.run("scancel", urgent)
        await watched.until(lambda: len(watched.in_state(PlaceState.READY)) == 2)

    play(story)


def test_another_master_finds_the_places_and_a_cancelled_one_is_told(play, slurm):
    async def story(places, watched):
        places.want(2, frozenset())
        await watched.until(lambda: len(watched.in_state(PlaceState.READY)) == 2)
        await places.detach()
        successor = watched.successor()
        found = await successor.found()
        try:
            assert sorted(place.id for place in found) == sorted(watched.places)
            gone, stays = sorted(watched.places)
            successor.want(2, frozenset())
            slurm.run("scancel", gone)
            await watched.until(lambda: gone in watched.lost)
            successor.want(2, frozenset())
            await watched.until(lambda: len(watched.in_state(PlaceState.READY)) == 2)
            assert watched.lost[gone].cause is ExitCause.DELETED
            assert stays in watched.places
        finally:
            await successor.close()
        assert watched.places == {}

    play(story)


def test_what_slurm_refuses_is_said_in_its_words(play):
    async def story(places, watched):
        places.want(1, frozenset())
        await watched.until(lambda: bool(watched.failures))
        assert watched.failures[0].startswith("Slurm refuses sbatch: ")
        assert "invalid partition" in watched.failures[0]

    play(story, "--partition=nowhere")


def test_a_node_that_is_gone_takes_its_places(play, slurm):  # the last: Slurm takes the node up again when it likes
    async def story(places, watched):
        places.want(1, frozenset())
        await watched.until(lambda: len(watched.in_state(PlaceState.READY)) == 1)
        (place_id,) = watched.places
        places.want(0, frozenset())
        slurm.run("scontrol", "update", f"nodename={watched.places[place_id].node}", "state=down", "reason=test")
        await watched.until(lambda: place_id in watched.lost)
        assert watched.lost[place_id].cause is ExitCause.NODE_LOST

    play(story)
