"""Workers as processes of this machine: the `Starter` whose places are slots.

Each is the leader of a session of its own, so that a signal to the terminal does not reach it and its children can be
ended with it; each dies with the master. What it prints goes to its log, or what it prints on stdout to a file beside. Its temporary
files are in a folder of its own, which goes with it: a worker that is killed cannot clean up after itself.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import IO
from urllib.parse import quote

from elasticdl.common.credentials import SHARED_GPU
from elasticdl.common.retry import Background
from elasticdl.master.core.events import ExitCause, FoundWorker, LauncherFailed, WorkerPlaced
from elasticdl.places.base import Place, PlaceChanged, PlaceLost, PlaceReport, PlaceState, StarterReport
from elasticdl.places.launcher import Seconds
from elasticdl.places.worker_process import InFile, MemoryKills, Spawner, WorkerRun, judge_process

# The slots of this machine: `Places` with its GPUs, or as many as wanted where there are none.
#
# A GPU is leased with a lock on a file of the user, so that two jobs on one machine never share one by accident: a job
# with more slots than GPUs shares them, and only with others of that kind. The lock goes with the process that holds it,
# however that ends.


QUERY_SECONDS = 20.0
# Another job may give a GPU back at any time, and does not tell us.
RETRY_SECONDS = 1.0
_log = logging.getLogger(__name__)


def find_gpus(environ: Mapping[str, str]) -> list[str]:
    """The ids of the GPUs that this process may use; empty where there is no NVIDIA driver, or none that answers."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        ).stdout
    except FileNotFoundError:
        return []
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("can't list the GPUs, going on as if there were none: %s", error)
        return []
    listed = re.findall(r"^ *(?:GPU|MIG) .*\(UUID: (\S+)\)", listing, re.MULTILINE)
    gpus = [each for each in listed if not each.startswith("MIG-")]
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return gpus
    numbers = {str(number): gpu for number, gpu in enumerate(gpus)}
    seen: list[str] = []
    for device in environ["CUDA_VISIBLE_DEVICES"].split(","):
        name = device.strip()
        begun = [each for each in listed if name and each.lower().startswith(name.lower())]
        found = [numbers[name]] if name in numbers else begun
        if len(found) != 1:  # CUDA stops there too
            if name not in ("", "-1"):
                _log.warning("CUDA_VISIBLE_DEVICES: %s is no one GPU's number or id, what follows is not used", device)
            break
        seen += found
    return list(dict.fromkeys(seen))


class Slots:
    """See `elasticdl.places.base.Places` for the contract. A slot is a READY place as long as its GPUs are leased."""

    def __init__(
        self, count: int, gpus: Sequence[str], locks: Path, report: PlaceReport, *, gpus_per_slot: int = 1
    ) -> None:
        """
        Args:
            count: At most so many at once; 0 for as many as the GPUs suffice for, or without limit where there are none.
            gpus: The ids of those that may be used.
            locks: Folder of the leases.
            gpus_per_slot: A worker in it sees so many; no fewer are leased.
        """
        self._gpus = gpus
        self._each = gpus_per_slot if gpus else 0
        self._count = count or (len(gpus) // gpus_per_slot if gpus else 0)
        self._limited = count > 0 or bool(gpus)
        self._shared = 0 < len(gpus) < self._count * gpus_per_slot
        self._locks = locks
        self._report = report
        self._ids = (f"slot-{number}" for number in itertools.count())
        self._waiting: dict[str, str] = {}  # why, by id
        self._leases: dict[str, dict[str, IO[str]]] = {}  # by id of the slot and of the GPU
        self._will_retry = False

    async def found(self) -> Sequence[Place]:
        """None: leases end with their master."""
        return ()

    def want(self, most: int, avoid: AbstractSet[str]) -> None:
        missing = most - len(self._leases) - len(self._waiting)
        for place_id in list(self._waiting)[missing:] if missing < 0 else ():
            self._end(place_id)
        for _ in range(missing):
            self._waiting[next(self._ids)] = ""
        self._lease_all()

    def give_back(self, place_id: str, *, at_once: bool) -> None:
        self._end(place_id)
        self._lease_all()

    async def close(self, *, keep: bool = False) -> None:
        for place_id in [*self._waiting, *self._leases]:
            self._end(place_id)

    def _end(self, place_id: str) -> None:
        if place_id in self._leases:
            _unlock(self._leases.pop(place_id))
        elif self._waiting.pop(place_id, None) is None:
            return
        self._report(PlaceLost(place_id, ExitCause.KILLED, -signal.SIGKILL, "its slot was given back"))

    def _lease_all(self) -> None:
        """Lease what is wanted, as far as it can be had."""
        for place_id in list(self._waiting):
            if place_id not in self._waiting:  # somebody has given it back when he heard of another
                continue
            leased = self._lease()
            if isinstance(leased, dict):
                del self._waiting[place_id]
                self._leases[place_id] = leased
                place = Place(place_id, state=PlaceState.READY, environment=self._environment(leased))
                self._report(PlaceChanged(place))
            elif self._waiting[place_id] != leased:
                self._waiting[place_id] = leased
                self._report(PlaceChanged(Place(place_id, reason=leased)))
        if self._waiting and not self._will_retry:
            self._will_retry = True
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._will_retry = False
        self._lease_all()

    def _lease(self) -> dict[str, IO[str]] | str:
        """The GPUs of another slot, locked, or why there are none at the moment."""
        if self._each > len(self._gpus):
            return f"a worker needs {self._each} GPUs, and there are {len(self._gpus)}"
        if self._limited and len(self._leases) >= self._count:
            all_gpus = self._gpus and self._count == len(self._gpus) // self._each
            return f"every {f'GPU is taken ({len(self._gpus)})' if all_gpus else f'slot is taken ({self._count})'}"
        uses = Counter(gpu for leased in self._leases.values() for gpu in leased)
        locked: dict[str, IO[str]] = {}
        try:
            for gpu in sorted(self._gpus, key=lambda gpu: uses[gpu]):
                if len(locked) < self._each and (self._shared or not uses[gpu]) and (lock := self._lock(gpu)):
                    locked[gpu] = lock
        except OSError as error:
            _unlock(locked)
            return f"can't lease a GPU in {self._locks}: {error.strerror}"
        if len(locked) < self._each:
            _unlock(locked)
            return "every GPU is taken, some by other jobs of yours"
        return locked

    def _lock(self, gpu: str) -> IO[str] | None:
        """None: somebody else has it.

        Raises:
            OSError: it can't be asked for.
        """
        self._locks.mkdir(parents=True, exist_ok=True)
        lock = (self._locks / f"{quote(gpu, safe='')}.lock").open("w")
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if isinstance(error, BlockingIOError):
                return None
            raise
        return lock

    def _environment(self, gpus: Mapping[str, IO[str]]) -> dict[str, str]:
        if not gpus:
            return {}
        order = sorted(gpus, key=self._gpus.index)
        return {"CUDA_VISIBLE_DEVICES": ",".join(order), **({SHARED_GPU: "1"} if self._shared else {})}


def _unlock(locked: Mapping[str, IO[str]]) -> None:
    for lock in locked.values():
        lock.close()


HOST = "127.0.0.1"
# A place that is idle is kept for so long: until a worker that is replaced at once has been launched, and no longer, as other jobs
# may wait for its GPU. A process that can't be killed keeps its GPU.
TIMES = Seconds(idle=1.0, kill=None)
# A process that is killed goes at once, unless the kernel holds it.
CLOSE_SECONDS = 10.0


class LocalStarter:
    """See `elasticdl.places.base.Starter` for the contract."""

    def __init__(
        self,
        spawner: Spawner,
        environment: Callable[[int, Place], dict[str, str]],
        log: Callable[[int], Path],
        out: Callable[[int], Path],
        report: StarterReport,
    ) -> None:
        """``log``, ``out``: the files that take what a worker prints on stderr and on stdout."""
        self._environment, self._log, self._out = environment, log, out
        self._report = report
        self._runs: dict[int, WorkerRun] = {}
        self._background = Background("workers are looked after", lambda why: report(LauncherFailed(why)))
        self._memory_kills = MemoryKills()
        self._spawner: asyncio.Future[Spawner] = asyncio.get_running_loop().create_future()
        self._spawner.set_result(spawner)

    async def found(self, places: Sequence[Place], remembered: Mapping[int, str]) -> Sequence[FoundWorker]:
        """None: workers of this machine die with their master."""
        return ()

    def start(self, worker_id: int, place: Place) -> None:
        output = InFile(self._log(worker_id), self._out(worker_id))
        run = self._runs[worker_id] = WorkerRun(worker_id, output)
        self._background.start(self._run(run, place))

    def end(self, worker_id: int, grace: float | None) -> None:
        if run := self._runs.get(worker_id):
            run.end(grace)

    def lost(self, place_id: str) -> None:
        """A slot is lost when it is given back, which is after the end of its worker."""

    def read_stacks(self, worker_id: int) -> None:
        if run := self._runs.get(worker_id):
            self._background.start(self._tell_stacks(run))

    async def _tell_stacks(self, run: WorkerRun) -> None:
        if found := await run.look(self._log(run.worker_id)):
            self._report(found)

    async def close(self, *, keep: bool = False) -> None:
        for run in self._runs.values():
            run.end(0)
        await self._spawner.result().close()
        if not await self._background.wait(CLOSE_SECONDS):
            _log.error("workers %s can't be killed: leaving them behind", sorted(self._runs))

    async def _run(self, run: WorkerRun, place: Place) -> None:
        """Start a worker, and report what becomes of it."""
        worker_id = run.worker_id
        environment = self._environment(worker_id, place)

        def placed(pid: int) -> None:
            self._report(WorkerPlaced(worker_id, HOST, pid))

        exited = judge_process(await run.ended(self._spawner, environment, placed, self._memory_kills))
        if exited.cause is ExitCause.CRASHED and run.was_started:
            exited = replace(exited, detail=f"{exited.detail}; its log: {self._log(worker_id)}")
        del self._runs[worker_id]
        self._report(exited)
        if run.left:
            await run.left
