"""Elastic systems behind one port, so that each is put through the same changes with the same model.

A system is left out, with a word about it, where its software is not installed. torchrun and horovodrun come with
elasticdl's own requirements, in the same versions; `setup.sh` makes a virtual environment for torchft.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import platformdirs
import psutil

from benchmarks.harness import versions
from benchmarks.job import ElasticJob
from benchmarks.processes import Processes, free_port, wait_until
from elasticdl.job.journal import Entry

NOTICE_SECONDS = 30.0
NOTICED = ("worker_draining", "worker_left")
ADDRESSES = 64  # of Horovod's hosts
GLOO_SECONDS = 15  # Horovod's default is 30
# torchft's, tuned for fast changes; the default for heartbeats is 5 s.
LIGHTHOUSE = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]
MOST_AGENTS = 16
STORE_SECONDS = 60.0
# torchrun's, tuned for fast changes; with the defaults (30 s last call) each takes far longer.
TIMERS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
# When agents share one store, a job that grows dies (torch 2.13).
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}


def training(program: str, loop: str, model: str, processes: Processes) -> list[str]:
    """The arguments of Python for a worker, which writes its step log."""
    options = ["--record", "steps", "--model", model, "--folder", str(processes.folder)]
    return ["-m", f"benchmarks.loops.{program}", loop, *options]


class Peer(Protocol):
    """One system. Its workers write step logs into the folder of the processes."""

    def missing(self) -> str | None:
        """Why it can't be measured here; None if it can."""

    def versions(self) -> dict[str, str]:
        """Of what it consists of, by the names of the packages."""

    def start(self, model: str, workers: int, processes: Processes) -> None:
        """Start a job that trains until it is killed."""

    def add(self) -> None:
        """Bring one worker more."""

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        """Send the signal to one worker, and to whatever stands for its machine; returns the worker's process id.

        A SIGTERM stands for notice to leave; a system that takes another kind of notice gets that instead.
        ``pids``: of the workers that train.
        """


class ElasticDl:
    """elasticdl itself: `elasticdl run` on this machine.

    A worker that leaves or is killed has its machine go with it, as at the peers. So once the master has noticed the signal,
    the job's maximum is lowered by one; otherwise it would replace the worker at once, and one leaving would be measured
    together with one joining. What it has begun of a replacement by then it ends, and nothing is told to the survivors. The
    master, like torchrun's store and torchft's lighthouse, is on no machine that goes.
    """

    def __init__(self) -> None:
        self._job: ElasticJob | None = None
        self._size = 0

    def missing(self) -> str | None:
        return None if versions(("horovod",)) else "horovod"

    def versions(self) -> dict[str, str]:
        return versions(("elasticdl", "horovod", "torch"))

    def start(self, model: str, workers: int, processes: Processes) -> None:
        self._size = workers
        program = [sys.executable, *training("library", "library", model, processes)]
        self._job = ElasticJob("peers", f"1-{workers}", program, {}, processes)
        self._job.start()

    def add(self) -> None:
        self._scale_by(1)

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        """The newest worker goes, as at the peers."""
        assert self._job is not None
        journal = self._job.journal
        started = {int(each["worker"]): int(each["pid"]) for each in journal.of("worker_started")}
        worker = max(worker for worker, pid in started.items() if pid in pids)
        mark = journal.mark()
        os.kill(started[worker], number)

        def noticed(entry: Entry) -> bool:
            return entry["event"] in NOTICED and bool(entry["worker"] == worker)

        journal.wait(noticed, mark, NOTICE_SECONDS, f"the master's notice of worker {worker}'s {number.name}")
        self._scale_by(-1)
        return started[worker]

    def _scale_by(self, workers: int) -> None:
        assert self._job is not None
        self._size += workers
        self._job.scale(1, self._size)


class HorovodRun:
    """Horovod's own elastic mode: horovodrun with a discovery script, one slot on each of several loopback addresses.

    A host that fails is never used again, so each newcomer comes on an address of its own. Horovod takes only addresses of
    an interface for local, hence the network namespace in which the loopback has them all.

    Horovod's notice that a worker is to leave is that its host is discovered no more; a SIGTERM to the worker is a death like
    any. After a death survivors may wait for Gloo's timeout, as they do for newcomers, which must have started within it.
    """

    def __init__(self) -> None:
        self._hosts: list[str] = []
        self._added = 0
        self._folder = Path()

    def missing(self) -> str | None:
        if not self._program().exists():
            return "horovodrun is not beside this Python"
        if lacking := [name for name in ("unshare", "ip") if not shutil.which(name)]:
            return f"no {' and '.join(lacking)} (Debian: util-linux, iproute2)"
        probe = subprocess.run([*_own_loopback(), "true"], capture_output=True, text=True, timeout=60, check=False)
        return f"no network namespace of its own: {probe.stderr.strip()}" if probe.returncode else None

    def versions(self) -> dict[str, str]:
        return versions(("horovod", "torch"))

    def start(self, model: str, workers: int, processes: Processes) -> None:
        self._folder = processes.folder
        script = self._folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self._folder}/hosts\n")
        script.chmod(0o755)
        for _ in range(workers):
            self.add()
        sizes = ["-np", str(workers), "--min-np", "1", "--max-np", str(workers)]
        timeout = ["--gloo-timeout-seconds", str(GLOO_SECONDS)]
        options = ["--gloo", *timeout, "--network-interface", "lo", *sizes, "--host-discovery-script", str(script)]
        program = [sys.executable, *training("peers", "horovodrun", model, processes)]
        path = f"{self._program().parent}{os.pathsep}{os.environ['PATH']}"
        command = [*_own_loopback(), str(self._program()), *options, *program]
        processes.start("horovodrun", command, {"PATH": path, "HOROVOD_GLOO_IFACE": "lo"})

    def add(self) -> None:
        self._added += 1
        self._discover([*self._hosts, f"127.0.0.{self._added}"])

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        victim = max(pids)
        if number == signal.SIGTERM:
            leaving = psutil.Process(victim).environ()["HOROVOD_HOSTNAME"]
            self._discover([host for host in self._hosts if host != leaving])
        else:
            os.kill(victim, number)
        return victim

    def _discover(self, hosts: list[str]) -> None:
        self._hosts = hosts
        new = self._folder / "hosts.new"
        new.write_text("".join(f"{host}:1\n" for host in hosts))
        new.replace(self._folder / "hosts")

    @staticmethod
    def _program() -> Path:
        return Path(sys.executable).parent / "horovodrun"


def _own_loopback() -> list[str]:
    """The beginning of a command line that runs the rest where the loopback has all addresses."""
    setup = f'ip link set lo up; for i in $(seq 2 {ADDRESSES}); do ip addr add 127.0.0.$i/8 dev lo; done; exec "$@"'
    return ["unshare", "--map-root-user", "--net", "sh", "-c", setup, "sh"]


class TorchFt:
    """A lighthouse, and one replica group of one process per worker, with a synchronous quorum each step."""

    def __init__(self) -> None:
        self._bin = platformdirs.user_cache_path("elasticdl") / "peers" / "torchft" / "bin"
        self._replicas: list[subprocess.Popen[bytes]] = []
        self._command: list[str] = []
        self._environment: dict[str, str] = {}
        self._processes: Processes | None = None

    def missing(self) -> str | None:
        program: Path = self._bin / "torchft_lighthouse"
        return None if program.exists() else "run benchmarks/peers/setup.sh"

    def versions(self) -> dict[str, str]:
        packages = [str(folder) for folder in self._bin.parent.glob("lib/*/site-packages")]
        return versions(("torchft-nightly", "torch"), packages)

    def start(self, model: str, workers: int, processes: Processes) -> None:
        self._processes = processes
        address = f"127.0.0.1:{free_port()}"
        processes.start("lighthouse", [str(self._bin / "torchft_lighthouse"), *LIGHTHOUSE, "--bind", address])
        self._environment = {"TORCHFT_LIGHTHOUSE": f"http://{address}", "GLOO_SOCKET_IFNAME": "lo"}
        self._command = [str(self._bin / "python"), *training("peers", "torchft", model, processes)]
        for _ in range(workers):
            self.add()

    def add(self) -> None:
        assert self._processes is not None
        number = len(self._replicas)
        command = [*self._command, "--way", str(number)]
        self._replicas.append(self._processes.start(f"replica-{number}", command, self._environment))

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        replica = next(replica for replica in reversed(self._replicas) if replica.pid in pids)
        replica.send_signal(number)
        return replica.pid


class TorchRun:
    """torchrun's elastic mode: one agent per worker; survivors are restarted and load a checkpoint on disk."""

    def __init__(self) -> None:
        self._agents: list[subprocess.Popen[bytes]] = []
        self._command: list[str] = []
        self._processes: Processes | None = None

    def missing(self) -> str | None:
        return None if importlib.util.find_spec("torch") else "torch"

    def versions(self) -> dict[str, str]:
        return versions(("torch",))

    def start(self, model: str, workers: int, processes: Processes) -> None:
        self._processes = processes
        port = free_port()
        elastic = [f"--nnodes=1:{MOST_AGENTS}", "--nproc-per-node=1", "--max-restarts=1000", "--monitor-interval=0.1"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark"]
        program = training("peers", "torchrun", model, processes)
        run = [sys.executable, "-m", "torch.distributed.run", *elastic, *meeting]
        self._command = [*run, f"--rdzv-conf={TIMERS}", "--local-addr=127.0.0.1", *program]
        self.add()
        wait_until(lambda: _listens(port), STORE_SECONDS, "torchrun's store")
        for _ in range(workers - 1):
            self.add()

    def add(self) -> None:
        assert self._processes is not None
        name = f"agent-{len(self._agents)}"
        self._agents.append(self._processes.start(name, self._command, UNSHARED))

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        """The newest agent goes: the oldest serves the store. A SIGKILL takes its worker along, as a lost machine."""
        agent = next(agent for agent in reversed(self._agents) if agent.poll() is None)
        (worker,) = {child.pid for child in psutil.Process(agent.pid).children(recursive=True)} & pids
        agent.send_signal(number)
        if number == signal.SIGKILL:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(worker).kill()
        return worker


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


SYSTEMS: dict[str, Callable[[], Peer]] = {
    "elasticdl": ElasticDl,
    "torchrun": TorchRun,
    "horovodrun": HorovodRun,
    "torchft": TorchFt,
}
