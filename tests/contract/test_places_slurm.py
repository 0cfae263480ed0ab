"""Places of a real Slurm (`elasticdl.places.slurm`), in which a stand-in for the agent runs."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from functools import partial

from places_kit import PlacesBench, opened

from elasticdl.master.core.events import ExitCause
from elasticdl.places.base import PlaceState
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
    async with opened(PlacesBench(partial(PolledPlaces, provider))) as bench:
        bench.another = partial(PolledPlaces, provider, bench.reports.put_nowait)
        yield bench
    assert slurm.run("squeue", "--noheader", f"--name={tmp_path.name}") == ""


@on(partial(on_slurm, arguments=("--partition=nowhere",)))
async def test_what_slurm_refuses_is_said_in_its_words(bench):
    bench.places.want(1, frozenset())
    failed = await bench.reports.get()
    assert failed.reason.startswith("Slurm refuses sbatch: ")
    assert "invalid partition" in failed.reason
    await bench.places.close()
    bench.reports = asyncio.Queue()


@on(on_slurm)
async def test_places_come_wait_are_dropped_and_are_found_by_the_next_master_which_hears_why_one_is_lost(
    bench, slurm, tmp_path
):
    """The last: Slurm takes the node up when it likes."""
    bench.places.want(PROCESSORS + 1, frozenset())
    await bench.has(ready=PROCESSORS, waiting=1)
    (waiting,) = bench.waiting()
    await bench.until(lambda bench: any(why in bench.now[waiting].reason for why in ("Resources", "Priority")))
    bench.places.want(PROCESSORS, frozenset())
    await bench.until(lambda bench: waiting in bench.lost)
    given_back, cancelled, *others = bench.ready()
    bench.places.want(PROCESSORS - 1, frozenset())
    bench.places.give_back(given_back, at_once=False)
    await bench.until(lambda bench: given_back in bench.lost)
    assert bench.lost[given_back].cause is ExitCause.KILLED
    assert "told to leave" in (tmp_path / f"{given_back}.out").read_text(), "by SIGTERM"
    await bench.places.close(keep=True)
    bench.places, bench.lost = bench.another(), {}
    found = {place.id for place in await bench.places.found() if place.state is PlaceState.READY}
    assert found == {cancelled, *others}
    slurm.run("scancel", cancelled)
    await bench.until(lambda bench: cancelled in bench.lost)
    bench.places.want(0, frozenset())
    slurm.run("scontrol", "update", f"nodename={bench.now[others[0]].node}", "state=down", "reason=test")
    await bench.until(lambda bench: not bench.now)
    causes = [bench.lost[each].cause for each in (cancelled, *others)]
    assert causes == [ExitCause.DELETED] + [ExitCause.NODE_LOST] * len(others)
