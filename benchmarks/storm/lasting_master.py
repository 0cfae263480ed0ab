"""A master that may be killed and started again, as on a cluster: it listens at one address, its memory is in a file, and the
agents of its workers outlive it. `python -m benchmarks.storm.lasting_master JOB_DIR HOST:PORT`

The agents run each in the network namespace of one host, and everybody has certificates: both are in the job's folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from elasticdl.common import credentials as variables
from elasticdl.common.credentials import Role, TlsFolder
from elasticdl.common.front_ends import RUN_MODULE
from elasticdl.job.jobdir import JobDir, MasterAddress, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.master.core.events import EndJob
from elasticdl.master.core.worker_record import Snapshot
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.calls import Server, TlsAccess
from elasticdl.master.shell.loop import SnapshotStore
from elasticdl.master.shell.serve import EXIT_CODES, Master
from elasticdl.places.base import Launcher, Limits, Place, PlaceLost, PlaceState, Report
from elasticdl.places.launcher import PlaceLauncher
from elasticdl.places.polled import PolledPlaces

HOSTS = "hosts.json"  # in the job's folder
MASTER_TIMEOUT = 120.0
POLL_SECONDS = 0.2
# Writes its process id before anything else, so that a master which is killed at that moment leaves no agent unknown to the next.
# The file is whole when it is there: somebody may end the place at once.
NOTE_AND_RUN = 'echo $$ > "$0.new"; mv "$0.new" "$0"; exec "$@"'


class Host(NamedTuple):
    """``pid``: of a process in its network namespace, 0 if that is the master's own."""

    address: str
    pid: int = 0


class HostProvider:
    """See `elasticdl.places.polled.Provider`: each place is an agent on the host that has the fewest. A file has its process id."""

    def __init__(self, job_dir: JobDir, master: str) -> None:
        self._folder = agents_of(job_dir)
        self._hosts = [Host(*each) for each in json.loads((job_dir.path / HOSTS).read_text())]
        self._environment = {
            **os.environ,
            variables.MASTER: master,
            variables.TOKEN: "",
            variables.TLS: str(job_dir.tls / Role.WORKER),
            variables.JOB_SPEC: str(job_dir.spec),
            variables.MASTER_TIMEOUT: f"{MASTER_TIMEOUT:g}",
            variables.LOGS: str(job_dir.logs),
        }
        self._children: list[subprocess.Popen[bytes]] = []

    async def list(self) -> Mapping[str, Place | PlaceLost]:
        self._children = [child for child in self._children if child.poll() is None]  # else they would seem to be there
        found: dict[str, Place | PlaceLost] = {}
        for file in self._folder.glob("*.pid"):
            if _runs(file):
                address = file.stem.rpartition("-")[0]
                found[file.stem] = Place(file.stem, address, PlaceState.READY)
            else:
                shutil.rmtree(file.with_suffix(".tmp"), ignore_errors=True)
                file.unlink()
        return found

    async def ask(self, avoid: AbstractSet[str]) -> str:
        busy = Counter(place_id.rpartition("-")[0] for place_id in await self.list())
        host = min(self._hosts, key=lambda each: busy[each.address])
        place_id = f"{host.address}-{time.monotonic_ns()}"
        temporary = self._folder / f"{place_id}.tmp"
        temporary.mkdir()
        own = {variables.PLACE: place_id, variables.NODE: host.address, "TMPDIR": str(temporary)}
        file = self._folder / f"{place_id}.pid"
        command = ["nsenter", f"--net=/proc/{host.pid}/ns/net", "sh", "-c", NOTE_AND_RUN, str(file)]
        with (self._folder / f"{place_id}.log").open("wb") as log:
            child = subprocess.Popen(
                [*command, *RUN_MODULE, "elasticdl.places.agent"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._environment, **own},
                start_new_session=True,
            )
        self._children.append(child)
        while not file.exists() and child.poll() is None:
            await asyncio.sleep(POLL_SECONDS / 10)
        return place_id

    async def end(self, place_ids: Sequence[str], *, at_once: bool) -> None:
        for place_id in place_ids:
            with suppress(FileNotFoundError, ProcessLookupError):
                pid = int((self._folder / f"{place_id}.pid").read_text())
                os.killpg(pid, signal.SIGKILL if at_once else signal.SIGTERM)


def _runs(pid_file: Path) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(int(pid_file.read_text())).status() != psutil.STATUS_ZOMBIE
    return False


def agents_of(job_dir: JobDir) -> Path:
    """What outlives a master: the agents' process ids, logs and temporary files."""
    folder: Path = job_dir.path / "agents"
    folder.mkdir(exist_ok=True)
    return folder


class FileStore(SnapshotStore):
    """See `elasticdl.master.shell.loop.SnapshotStore`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def load(self) -> Snapshot | None:
        return Snapshot.from_json(self._path.read_text()) if self._path.exists() else None

    async def save(self, memory: Snapshot) -> None:
        write_aside(self._path, memory.to_json())


async def run(job_dir: JobDir, host: str, port: int) -> EndJob:
    spec = JobSpec.from_json(job_dir.spec.read_text())
    server, agents = Server(host, TlsAccess.load(TlsFolder(job_dir.tls / Role.MASTER))), Agents()
    own = MasterAddress.of_this_process(f"{host}:{server.bind(port)}", "")
    address = replace(own, tls=str(job_dir.tls / Role.OWNER))
    places = partial(PolledPlaces, HostProvider(job_dir, f"{host}:{port}"), seconds=POLL_SECONDS)

    def make_launcher(report: Report, limits: Limits) -> Launcher:
        return PlaceLauncher(places, agents.reporting_to, report)

    store = FileStore(job_dir.path / "memory.json")
    return await Master(spec, job_dir, server, store, make_launcher, agents=agents, address=address).run()


def main(job_dir: str, address: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host, _, port = address.rpartition(":")
    return EXIT_CODES[asyncio.run(run(JobDir(Path(job_dir)), host, int(port))).phase]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
