"""A job on a cluster as a benchmark sees it: submitted by the command line, and followed by it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.clusters import Place
from benchmarks.job import COMMAND, Journal
from benchmarks.processes import Failed, Processes, wait_until

COMMAND_SECONDS = 120.0
Entry = dict[str, Any]


def started_in(pod: str) -> Callable[[Entry], bool]:
    """Whether an entry of the journal tells that a worker was started in that pod."""
    return lambda entry: bool(entry["event"] == "worker_started" and entry["place"] == pod)


class ClusterJob:
    """In a folder of its own that stands in for the user's state directory."""

    def __init__(self, name: str, place: Place, processes: Processes) -> None:
        self._name = name
        self._place = place
        self._processes = processes
        self._env = place.environment(processes.folder)
        self._followers: list[subprocess.Popen[bytes]] = []
        self._offset = 0
        self._marks: list[Entry] = []
        self.journal = Journal(processes.log_of("events"), self.raise_if_over)

    def submit(self, options: Mapping[str, str], program: Sequence[str]) -> None:
        """And begin to follow its journal.

        Raises:
            Failed: it was refused.
        """
        given = {"job_name": self._name, "image": self._place.image, **options}
        flags = [part for name, value in given.items() for part in (f"--{name}", value)]
        self.command("run", "--detach", *flags, "--namespace", self._place.namespace, "--", *program)
        self._follow("events", "--json")

    def follow_logs(self) -> None:
        """So that `mark` has something to find."""
        self._follow("logs")

    def command(self, name: str, *arguments: str) -> str:
        """What a command of the command line prints.

        Raises:
            Failed: it ended with an error, or not in time.
        """
        env = {**self._processes.env, **self._env}
        try:
            done = subprocess.run(
                [*COMMAND, name, *arguments],
                env=env,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"elasticdl {name}: not done in {COMMAND_SECONDS:g} s") from None
        if done.returncode:
            raise Failed(f"elasticdl {name} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def delete(self) -> None:
        """Its objects with all that it started."""
        self.command("delete", self._name, "--namespace", self._place.namespace)

    def mark(self, name: str, worker: int, seconds: float) -> Entry:
        """The first such mark that a worker printed (`benchmarks.loops.marked_steps`).

        Raises:
            Failed: it did not in time.
        """
        found: list[Entry] = []

        def printed() -> bool:
            found.extend(each for each in self._read_marks() if (each["mark"], each["worker"]) == (name, worker))
            return bool(found)

        wait_until(printed, seconds, f"the {name.replace('_', ' ')} of worker {worker}")
        return found[0]

    def raise_if_over(self) -> None:
        if any(process.poll() is not None for process in self._followers):
            raise Failed(f"job {self._name} ended early\n{self._processes.tail('events')}")

    def _follow(self, what: str, *flags: str) -> None:
        command = [*COMMAND, what, self._name, "--follow", *flags, "--namespace", self._place.namespace]
        self._followers.append(self._processes.start(what, command, self._env))

    def _read_marks(self) -> list[Entry]:
        with self._processes.log_of("logs").open("rb") as lines:
            lines.seek(self._offset)
            whole, newline, _ = lines.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.decode(errors="replace").splitlines():
            _, bar, said = line.partition("| ")
            if bar and said.startswith('{"mark"'):
                self._marks.append(json.loads(said))
        return self._marks
