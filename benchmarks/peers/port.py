"""The port to a peer: another elastic framework, put through the same changes with the same model."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Protocol

from benchmarks.processes import Processes
from benchmarks.steps import Gap


@dataclass(frozen=True, slots=True)
class PeerChange:
    """One change; ``restarted``: survivors that went on in a new process."""

    event: str
    before: int
    after: int
    gap: Gap
    restarted: int


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
