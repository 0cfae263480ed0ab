"""torchrun's elastic mode: one agent per worker; survivors are restarted and load a checkpoint on disk."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import socket
import subprocess
import sys

import psutil

from benchmarks.harness import versions
from benchmarks.processes import Processes, free_port, wait_until

MOST_WORKERS = 16
STORE_SECONDS = 60.0
# Tuned for fast changes; with the defaults (30 s last call) each takes far longer.
TIMERS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
# When agents share one store, a job that grows dies (torch 2.13).
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}


class TorchRun:
    """See `benchmarks.peers.port.Peer`."""

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
        elastic = [f"--nnodes=1:{MOST_WORKERS}", "--nproc-per-node=1", "--max-restarts=1000", "--monitor-interval=0.1"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=benchmark"]
        program = ["-m", "benchmarks.loops.torchrun_ddp", "--model", model, "--folder", str(processes.folder)]
        run = [sys.executable, "-m", "torch.distributed.run", *elastic, *meeting]
        self._command = [*run, f"--rdzv-conf={TIMERS}", "--local-addr=127.0.0.1", *program]
        self.add()
        wait_until(lambda: listens(port), STORE_SECONDS, "torchrun's store")
        for _ in range(workers - 1):
            self.add()

    def add(self) -> None:
        assert self._processes is not None
        name = f"agent-{len(self._agents)}"
        self._agents.append(self._processes.start(name, self._command, ENVIRONMENT))

    def remove(self, number: signal.Signals, pids: set[int]) -> int:
        """The newest agent goes: the oldest serves the store. A SIGKILL takes its worker along, as a lost machine."""
        agent = next(agent for agent in reversed(self._agents) if agent.poll() is None)
        (worker,) = {child.pid for child in psutil.Process(agent.pid).children(recursive=True)} & pids
        agent.send_signal(number)
        if number == signal.SIGKILL:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(worker).kill()
        return worker


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
