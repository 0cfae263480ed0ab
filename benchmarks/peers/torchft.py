"""torchft: a lighthouse, and one replica group of one process per worker, with a synchronous quorum each step."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import platformdirs

from benchmarks.harness import versions
from benchmarks.processes import Processes, free_port

# Tuned for fast changes; the default for heartbeats is 5 s.
LIGHTHOUSE = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"]


class TorchFt:
    """See `benchmarks.peers.port.Peer`."""

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
        program = ["-m", "benchmarks.loops.torchft_ddp", "--model", model, "--folder", str(processes.folder)]
        self._command = [str(self._bin / "python"), *program]
        for _ in range(workers):
            self.add()

    def add(self) -> None:
        assert self._processes is not None
        number = len(self._replicas)
        command = [*self._command, "--replica", str(number)]
        self._replicas.append(self._processes.start(f"replica-{number}", command, self._environment))

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        replica = next(replica for replica in reversed(self._replicas) if replica.pid in pids)
        replica.send_signal(number)
        return replica.pid
