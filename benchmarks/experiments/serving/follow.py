"""The training job, followed by the commands that a user follows it with; what they print stays in --out."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.experiments.lab import Lab
from benchmarks.experiments.zoo.step_log import LoggedStep, logged_steps
from benchmarks.job import COMMAND
from benchmarks.processes import Failed, Processes, wait_until
from elasticdl.job.journal import Entry

JOURNAL, LOGS = "journal", "logs"
END_SECONDS = 60.0
LOOK_SECONDS = 0.3


@dataclass(slots=True)
class Followed:
    """A job that was submitted; its followers end with ``processes``."""

    lab: Lab
    name: str
    processes: Processes
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        where = ["--namespace", self.lab.namespace]
        if self.lab.options.kube_context:
            where += ["--kube_context", self.lab.options.kube_context]
        for name, arguments in {JOURNAL: ["events", self.name, "--json"], LOGS: ["logs", self.name]}.items():
            self._started[name] = self.processes.start(name, [*COMMAND, *arguments, "--follow", *where], self.lab.env)

    def entries(self) -> list[Entry]:
        """Of the journal, so far; what else the command says is left out."""
        return [json.loads(line) for line in _whole_lines(self.processes.log_of(JOURNAL)) if line.startswith("{")]

    def steps(self) -> list[LoggedStep]:
        return sorted(logged_steps(_whole_lines(self.processes.log_of(LOGS))), key=lambda step: step.time)

    def alive(self) -> None:
        """Raises:
        Failed: nothing is followed any more; the job is over, or its master can't be found.
        """
        for name, process in self._started.items():
            if process.poll() is not None:
                raise Failed(f"job {self.name} ended early; its {name}:\n{self.processes.tail(name)}")

    def wait_for_world(self, workers: int, seconds: float) -> None:
        """Raises:
        Failed: so many workers did not come together in time.
        """

        def formed() -> bool:
            self.alive()
            worlds = [len(entry["members"]) for entry in self.entries() if entry["event"] == "world_formed"]
            return worlds[-1:] == [workers]

        wait_until(formed, seconds, f"a world of {workers} workers")

    def wait_for_steps(self, workers: int, seconds: float) -> None:
        """Until so many workers make them.

        Raises:
            Failed: they did not in time.
        """

        def made() -> bool:
            time.sleep(LOOK_SECONDS)  # the logs are long
            self.alive()
            return [step.workers for step in self.steps()[-1:]] == [workers]

        wait_until(made, seconds, f"steps of {workers} workers")

    def stop(self) -> None:
        """The job, by the command; returns when the followers have seen its end.

        Raises:
            Failed: it did not end in time.
        """
        self.lab.elasticdl("stop", self.name)
        ended = self._started.values()
        wait_until(lambda: all(process.poll() is not None for process in ended), END_SECONDS, f"the end of {self.name}")


def _whole_lines(path: Path) -> Iterator[str]:
    text = path.read_text(errors="replace") if path.exists() else ""
    return iter(text.rpartition("\n")[0].splitlines())
