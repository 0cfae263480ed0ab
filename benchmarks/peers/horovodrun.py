"""Horovod's own elastic mode: horovodrun with a discovery script, one slot on each of several loopback addresses.

A host that fails is never used again, so each newcomer comes on an address of its own. Horovod takes only addresses of
an interface for local, hence the network namespace in which the loopback has them all.

Horovod's notice that a worker is to leave is that its host is discovered no more; a SIGTERM to the worker is a death like
any. After a death survivors may wait for Gloo's timeout, as they do for newcomers, which must have started within it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.harness import versions
from benchmarks.processes import Processes

ADDRESSES = 64
GLOO_SECONDS = 15  # Horovod's default is 30


class HorovodRun:
    """See `benchmarks.peers.port.Peer`."""

    def __init__(self) -> None:
        self._hosts: list[str] = []
        self._added = 0
        self._folder = Path()

    def missing(self) -> str | None:
        if not self._program().exists():
            return "horovodrun is not beside this Python"
        if lacking := [name for name in ("unshare", "ip") if not shutil.which(name)]:
            return f"no {' and '.join(lacking)} (Debian: util-linux, iproute2)"
        probe = subprocess.run([*namespace(), "true"], capture_output=True, text=True, timeout=60, check=False)
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
        program = [sys.executable, "-m", "benchmarks.loops.horovod_elastic"]
        arguments = ["--model", model, "--folder", str(self._folder)]
        path = f"{self._program().parent}{os.pathsep}{os.environ['PATH']}"
        command = [*namespace(), str(self._program()), *options, *program, *arguments]
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


def namespace() -> list[str]:
    """The beginning of a command line that runs the rest where the loopback has all addresses."""
    setup = f'ip link set lo up; for i in $(seq 2 {ADDRESSES}); do ip addr add 127.0.0.$i/8 dev lo; done; exec "$@"'
    return ["unshare", "--map-root-user", "--net", "sh", "-c", setup, "sh"]
