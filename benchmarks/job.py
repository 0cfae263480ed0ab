"""An elasticdl job as a benchmark sees it: started like a user would, then followed by its journal."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.processes import Failed, Growing, Processes, wait_until
from elasticdl.cli.folder_job import handle_of
from elasticdl.job.jobdir import JobDir
from elasticdl.job.journal import Entry, parse_entry
from elasticdl.job.spec import WorkerRange

COMMAND = (sys.executable, "-m", "elasticdl.cli")


def flags_of(options: Mapping[str, object]) -> list[str]:
    """Options of a command, by their names without the dashes."""
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def success_of(name: str, journal: Sequence[Entry]) -> Entry:
    """The last entry of a job."""
    ends = [entry for entry in journal if entry["event"] == "job_finished"]
    if not ends or ends[-1]["phase"] != "succeeded":
        raise Failed(f"job {name} has not succeeded: {ends[-1]['reason'] if ends else 'it has not finished'}")
    return ends[-1]


class Journal:
    """Follows a journal; every entry is kept."""

    def __init__(self, path: Path, alive: Callable[[], None]) -> None:
        """``alive`` raises when nothing more will come."""
        self._lines = Growing(path)
        self._alive = alive
        self.entries: list[Entry] = []

    def read(self) -> list[Entry]:
        """All entries so far."""
        # What a command prints that follows a journal has its warnings among the entries.
        self.entries += filter(None, map(parse_entry, self._lines.new_lines()))
        return self.entries

    def of(self, event: str) -> list[Entry]:
        """All of that kind so far."""
        return [entry for entry in self.read() if entry["event"] == event]

    def mark(self) -> int:
        """A place in the journal to search from: its end now."""
        return len(self.read())

    def wait(self, wanted: Callable[[Entry], object], start: int, seconds: float, what: str) -> Entry:
        """The first such entry at or after ``start``."""
        found = wait_until(lambda: next(filter(wanted, self.read()[start:]), None), seconds, what, self._alive)
        assert found is not None
        return found


class ElasticJob:
    """One job on this machine, in a folder of its own that stands in for the user's state directory."""

    def __init__(
        self,
        name: str,
        workers: str,
        program: Sequence[str],
        options: Mapping[str, str],
        processes: Processes,
        task: str = "run",
    ) -> None:
        """``program`` is what `elasticdl run` is given; ``options`` its other options, without the dashes. ``task``: another command."""
        self._name = name
        self._processes = processes
        flags = flags_of({"job_name": name, "num_workers": workers, **options})
        self._command = [*COMMAND, task, *flags, *(["--", *program] if program else [])]
        self._process: subprocess.Popen[bytes] | None = None
        self.dir = JobDir(processes.folder / "jobs" / name)
        self.journal = Journal(self.dir.journal, self.raise_if_over)

    def start(self) -> None:
        env = {"ELASTICDL_HOME": str(self._processes.folder)}
        self._process = self._processes.start(self._name, self._command, env)

    def scale(self, minimum: int, maximum: int) -> None:
        with handle_of(self.dir).master() as client:
            client.scale(WorkerRange(minimum=minimum, maximum=maximum))

    def stop(self, seconds: float = 30.0) -> None:
        """End it and wait; by SIGTERM, as SIGINT is ignored by whatever a shell has put into the background."""
        assert self._process is not None
        process = self._process
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: process.poll() is not None, seconds, f"{self._name}: stopping")

    def pid_of(self, worker: int) -> int:
        return int([entry for entry in self.journal.of("worker_started") if entry["worker"] == worker][-1]["pid"])

    def world(self) -> Entry:
        """The newest world that was formed."""
        return self.journal.of("world_formed")[-1]

    def raise_if_over(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            logs = [self._processes.log_of(self._name), *sorted(self.dir.logs.glob("*.log"))]
            tails = [f"-- {log.name}\n" + "\n".join(log.read_text().splitlines()[-8:]) for log in logs]
            raise Failed("\n".join([f"job {self._name} ended early", *tails]))
