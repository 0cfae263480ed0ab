"""Elastic systems behind one port, so that each is put through the same changes with the same model.

A system is left out, with a word about it, where its software is not installed. torchrun and horovodrun come with
elasticdl's own requirements, in the same versions; `setup.sh` makes a virtual environment for torchft.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs
import psutil

from benchmarks.harness import versions
from benchmarks.job import ElasticJob, flags_of
from benchmarks.processes import Processes, free_port, wait_until
from elasticdl.job.jobdir import write_aside
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


class Peer:
    """One system. Its workers write step logs into the folder of the processes; it trains until it is killed."""

    packages: Sequence[str] = ("torch",)  # of what it consists of
    _processes: Processes

    def missing(self) -> str | None:
        """Why it can't be measured here; None if it can."""
        return next((name for name in self.packages if name not in self.versions()), None)

    def versions(self) -> dict[str, str]:
        return versions(self.packages)

    def start(self, model: str, workers: int, processes: Processes) -> None:
        self._processes = processes
        self._begin(model, workers)

    def _begin(self, model: str, workers: int) -> None:
        raise NotImplementedError

    def add(self) -> None:
        """Bring one worker more."""
        raise NotImplementedError

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        """Send the signal to one worker, and to whatever stands for its machine; returns the worker's process id.

        A SIGTERM stands for notice to leave; a system that takes another kind of notice gets that instead.
        ``pids``: of the workers that train.
        """
        raise NotImplementedError

    def _training(self, program: str, loop: str, model: str) -> list[str]:
        """The arguments of Python for a worker, which writes its step log."""
        given = {"record": "steps", "model": model, "folder": self._processes.folder}
        return ["-m", f"benchmarks.loops.{program}", loop, *flags_of(given)]


class Agents(Peer):
    """A process of its own for each worker."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self._command: list[str] = []
        self._environment: dict[str, str] = {}

    def add(self) -> None:
        name = f"agent-{len(self._started)}"
        self._started.append(self._processes.start(name, self._command, self._environment))

    def _newest(self) -> subprocess.Popen[bytes]:
        return next(agent for agent in reversed(self._started) if agent.poll() is None)


class ElasticDl(Peer):
    """elasticdl itself: `elasticdl run` on this machine.

    A worker that leaves or is killed has its machine go with it, as at the peers. So once the master has noticed the signal,
    the job's maximum is lowered by one; otherwise it would replace the worker at once, and one leaving would be measured
    together with one joining. What it has begun of a replacement by then it ends, and nothing is told to the survivors. The
    master, like torchrun's store and torchft's lighthouse, is on no machine that goes.
    """

    packages = ("elasticdl", "horovod", "torch")
    _job: ElasticJob
    _size = 0

    def _begin(self, model: str, workers: int) -> None:
        self._size = workers
        program = [sys.executable, *self._training("library", "library", model)]
        self._job = ElasticJob("peers", f"1-{workers}", program, {}, self._processes)
        self._job.start()

    def add(self) -> None:
        self._scale_by(1)

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        """The newest worker goes, as at the peers."""
        journal = self._job.journal
        started = {int(each["worker"]): int(each["pid"]) for each in journal.of("worker_started")}
        worker = max(worker for worker, pid in started.items() if pid in pids)
        mark = journal.mark()
        os.kill(started[worker], number)

        def noticed(entry: Entry) -> object:
            return entry["event"] in NOTICED and entry["worker"] == worker

        journal.wait(noticed, mark, NOTICE_SECONDS, f"the master's notice of worker {worker}'s {number.name}")
        self._scale_by(-1)
        return started[worker]

    def _scale_by(self, workers: int) -> None:
        self._size += workers
        self._job.scale(1, self._size)


class HorovodRun(Peer):
    """Horovod's own elastic mode: horovodrun with a discovery script, one slot on each of several loopback addresses.

    A host that fails is never used again, so each newcomer comes on an address of its own. Horovod takes only addresses of
    an interface for local, hence the network namespace in which the loopback has them all.

    Horovod's notice that a worker is to leave is that its host is discovered no more; a SIGTERM to the worker is a death like
    any. After a death survivors may wait for Gloo's timeout, as they do for newcomers, which must have started within it.
    """

    packages = ("horovod", "torch")

    def __init__(self) -> None:
        self._hosts: list[str] = []
        self._added = 0

    def missing(self) -> str | None:
        if not self._program().exists():
            return "horovodrun is not beside this Python"
        if lacking := [name for name in ("unshare", "ip") if not shutil.which(name)]:
            return f"no {' and '.join(lacking)} (Debian: util-linux, iproute2)"
        probe = subprocess.run([*_own_loopback(), "true"], capture_output=True, text=True, timeout=60, check=False)
        return f"no network namespace of its own: {probe.stderr.strip()}" if probe.returncode else None

    def _begin(self, model: str, workers: int) -> None:
        script = self._processes.folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {script.with_name('hosts')}\n")
        script.chmod(0o755)
        for _ in range(workers):
            self.add()
        sizes = ["-np", str(workers), "--min-np", "1", "--max-np", str(workers)]
        timeout = ["--gloo-timeout-seconds", str(GLOO_SECONDS)]
        options = ["--gloo", *timeout, "--network-interface", "lo", *sizes, "--host-discovery-script", str(script)]
        program = [sys.executable, *self._training("peers", "horovodrun", model)]
        path = f"{self._program().parent}{os.pathsep}{os.environ['PATH']}"
        command = [*_own_loopback(), str(self._program()), *options, *program]
        self._processes.start("horovodrun", command, {"PATH": path, "HOROVOD_GLOO_IFACE": "lo"})

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
        write_aside(self._processes.folder / "hosts", "".join(f"{host}:1\n" for host in hosts))

    @staticmethod
    def _program() -> Path:
        return Path(sys.executable).parent / "horovodrun"


def _own_loopback() -> list[str]:
    """The beginning of a command line that runs the rest where the loopback has all addresses."""
    setup = f'ip link set lo up; for i in $(seq 2 {ADDRESSES}); do ip addr add 127.0.0.$i/8 dev lo; done; exec "$@"'
    return ["unshare", "--map-root-user", "--net", "sh", "-c", setup, "sh"]


class TorchFt(Agents):
    """A lighthouse, and one replica group of one process per worker, with a synchronous quorum each step."""

    bin = platformdirs.user_cache_path("elasticdl") / "peers" / "torchft" / "bin"

    def missing(self) -> str | None:
        program: Path = self.bin / "torchft_lighthouse"
        return None if program.exists() else "run benchmarks/peers/setup.sh"

    def versions(self) -> dict[str, str]:
        packages = [str(folder) for folder in self.bin.parent.glob("lib/*/site-packages")]
        return versions(("torchft-nightly", "torch"), packages)

    def _begin(self, model: str, workers: int) -> None:
        address = f"127.0.0.1:{free_port()}"
        self._processes.start("lighthouse", [str(self.bin / "torchft_lighthouse"), *LIGHTHOUSE, "--bind", address])
        self._environment = {"TORCHFT_LIGHTHOUSE": f"http://{address}", "GLOO_SOCKET_IFNAME": "lo"}
        self._command = [str(self.bin / "python"), *self._training("peers", "torchft", model)]
        for _ in range(workers):
            self.add()

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        replica = self._newest()
        replica.send_signal(number)
        return replica.pid


class TorchRun(Agents):
    """torchrun's elastic mode: one agent per worker; survivors are restarted and load a checkpoint on disk."""

    def _begin(self, model: str, workers: int) -> None:
        port, self._environment = free_port(), UNSHARED
        elastic = [f"--nnodes=1:{MOST_AGENTS}", "--nproc-per-node=1", "--max-restarts=1000", "--monitor-interval=0.1"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark"]
        program = self._training("peers", "torchrun", model)
        run = [sys.executable, "-m", "torch.distributed.run", *elastic, *meeting]
        self._command = [*run, f"--rdzv-conf={TIMERS}", "--local-addr=127.0.0.1", *program]
        self.add()
        wait_until(lambda: _listens(port), STORE_SECONDS, "torchrun's store")
        for _ in range(workers - 1):
            self.add()

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        """The newest agent goes: the oldest serves the store. A SIGKILL takes its worker along, as a lost machine."""
        agent = self._newest()
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
