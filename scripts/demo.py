#!/usr/bin/env python3
"""The main job with a scripted change of workers: real digits on 2 to 4 workers, one killed, one told to leave.

    python scripts/demo.py

Runs `elasticdl train` as a person would, disturbs it from outside as a cluster would, and ends with what it cost: every
change of the world, how long the survivors paused for it, whether a step was lost, and the accuracy on held-out digits (at
least 97 %). It ends within twelve minutes, whatever happens, and leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table
from setup_steps import signals_held_back

from elasticdl.job.jobdir import JobDir
from elasticdl.job.journal import Entry, read_journal

REPOSITORY = Path(__file__).resolve().parents[1]
TRAIN = [
    *("--model_zoo", "model_zoo", "--model_def", "digits.cnn_torch", "--num_workers", "2-4"),
    *("--global_batch_size", "256", "--max_worker_batch_size", "64", "--num_epochs", "150"),
]
NAME = "demo"
GOAL = 0.97
# For a change to come about; newcomers import their framework first, on a small machine all at once.
DEADLINE = 180.0
WHOLE_DEADLINE = 600.0
STOP_SECONDS = 30.0  # for the job to end once it is asked to, and again once it is told to
NEXT = """\
    source .venv/bin/activate
    elasticdl train --job_name quick --num_workers 2-4 \\
        --model_zoo model_zoo --model_def digits.cnn_torch \\
        --global_batch_size 256 --max_worker_batch_size 64 --num_epochs 1000"""


class Disturbance(threading.Thread):
    """Does to the job what a cluster does: kills a worker, then takes one away. It prints nothing: the terminal is the job's."""

    def __init__(self, job: JobDir) -> None:
        super().__init__(name="disturbance", daemon=True)
        self._job = job
        self._over = threading.Event()
        self.problem = ""

    def stop(self) -> None:
        self._over.set()
        self.join(timeout=5.0)

    def run(self) -> None:
        try:
            world = self._wait_for_world(size=4, after=0)
            self._strike(world, rank=1, number=signal.SIGKILL, what="killed without warning")
            world = self._wait_for_world(size=3, after=world["world"])
            world = self._wait_for_world(size=4, after=world["world"])
            self._strike(world, rank=0, number=signal.SIGTERM, what="told to leave, as in a preemption")
            self._wait_for_world(size=3, after=world["world"])
        except (TimeoutError, ProcessLookupError) as error:
            self.problem = f"the disturbance did not come about: {error}"

    def _strike(self, world: Entry, *, rank: int, number: signal.Signals, what: str) -> None:
        worker = world["members"][rank]
        if self._over.wait(2.0):  # for the eye: some steps in this world first
            raise TimeoutError(f"the job ended before worker {worker} was {what}")
        pid = next(e["pid"] for e in self._entries("worker_started") if e["worker"] == worker)
        os.kill(pid, number)

    def _wait_for_world(self, *, size: int, after: int) -> Entry:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline and not self._over.is_set():
            for entry in self._entries("world_formed"):
                if entry["world"] > after and len(entry["members"]) == size:
                    return entry
            self._over.wait(0.1)
        raise TimeoutError(f"there was no world of {size} workers after world {after} before the job ended")

    def _entries(self, event: str) -> Iterator[Entry]:
        if self._job.journal.exists():
            yield from (entry for entry in read_journal(self._job.journal) if entry["event"] == event)


def pauses_table(entries: list[Entry]) -> Table:
    table = Table(title="Who came and went, and for how long the slowest of the others paused")
    for heading in ("world", "workers", "pause"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", no_wrap=True, overflow="ellipsis")
    for world in (entry for entry in entries if entry["event"] == "world_formed"):
        pauses = [e for e in entries if e["event"] == "pause" and e["world"] == world["world"]]
        longest = max((pause["total"] for pause in pauses), default=None)
        pause = "-" if longest is None else f"{1e3 * longest:.0f} ms"
        table.add_row(str(world["world"]), str(len(world["members"])), pause, world["reason"])
    return table


def steps_line(entries: list[Entry]) -> str:
    """Whether each step was made once, by the journal's own count of them.

    Raises:
        ValueError: the two counts differ.
    """
    told = [entry for entry in entries if entry["event"] == "steps"]
    made, again = (sum(entry[name] for entry in told) for name in ("steps", "again"))
    last = max((entry["step"] for entry in entries if entry["event"] == "epoch_finished"), default=0)
    if made - again != last:
        raise ValueError(f"the journal counts {made - again:,} steps, and the last one has the number {last:,}")
    twice = "none was lost or made twice" if not again else f"none was lost, {again} made again"
    return f"steps: [bold]{last:,}[/] in the model, {made:,} in the journal: {twice}"


def accuracy_reached(entries: list[Entry]) -> float:
    """Of the last evaluation.

    Raises:
        ValueError: there was none.
    """
    reached = [entry["metrics"]["accuracy"] for entry in entries if entry["event"] == "evaluation"]
    if not reached:
        raise ValueError("the journal has no evaluation of the model")
    return float(reached[-1])


def run(command: list[str], home: str) -> int:
    """The exit code of the job, which has ended when this returns or raises."""
    job: subprocess.Popen[bytes] | None = None
    asked = False
    try:
        with signals_held_back():  # else one that comes now leaves a job behind that nobody knows
            job = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "ELASTICDL_HOME": home})
        return job.wait(WHOLE_DEADLINE)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the job was stopped after {WHOLE_DEADLINE:.0f} s") from None
    except KeyboardInterrupt:
        asked = True  # Ctrl-C has reached the job as well
        raise
    finally:
        if job is not None:
            end(job, asked)


def end(job: subprocess.Popen[bytes], asked: bool) -> None:
    """With a checkpoint, else at once, else by force: the master ends when the command does. A further signal is the next of these."""
    for number in (None if asked else signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None and number is not None:
            job.send_signal(number)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
            job.wait(STOP_SECONDS)


def told_to_end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # by way of what ends the job


def main() -> int:
    console = Console()
    with tempfile.TemporaryDirectory(prefix="elasticdl-demo-") as home:
        job = JobDir(Path(home) / "jobs" / NAME)
        console.print(f"[bold]$ elasticdl train {' '.join(TRAIN)}[/]")
        console.print("demo: soon one of its workers is killed; then another is told to leave, as in a preemption")
        disturbance = Disturbance(job)
        disturbance.start()
        try:
            code = run([sys.executable, "-m", "elasticdl.cli", "train", "--job_name", NAME, *TRAIN], home)
        finally:
            disturbance.stop()
        entries = list(read_journal(job.journal)) if job.journal.exists() else []
    if code != 0 or disturbance.problem:
        console.print(f"[red]demo: {disturbance.problem or f'the job ended with {code}'}[/]")
        return code or 1
    console.print(pauses_table(entries))
    console.print(steps_line(entries))
    accuracy = accuracy_reached(entries)
    console.print(f"accuracy on held-out digits: [bold]{accuracy:.1%}[/] (asked for: at least {GOAL:.0%})")
    if accuracy < GOAL:
        return 1
    console.print(
        "Next, a job of your own, and in another terminal `elasticdl status quick` (README.md goes on from there):"
    )
    console.print(NEXT, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, told_to_end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (TimeoutError, ValueError, subprocess.SubprocessError) as error:
        sys.exit(f"demo: {error}")
