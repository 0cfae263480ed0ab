"""A storm within namespaces of its own: `python -m benchmarks.storm.inside FOLDER OUT DISTURBANCES SEED PROCESSES MOST_WORKERS`.

Started by `benchmarks.storm` in a network and a mount namespace, and below a process that collects what is orphaned.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import psutil

from benchmarks.harness import Results, Summary, show_table, summarise
from benchmarks.processes import Failed, Processes
from benchmarks.storm.driver import Brought, Driver, Kind, Story, ranges_up_to, schedule
from benchmarks.storm.job import LastingJob
from benchmarks.storm.surroundings import Disk, Network
from benchmarks.storm.training import STEPS_PER_EPOCH, Agreement, check_journal, compare
from elasticdl.job.journal import Entry, dump_entry

HOSTS = 8  # more than there are workers, those that start and end included
STEPS_PER_DISTURBANCE = 50
GONE_SECONDS = 10.0
LINE_SECONDS = 10.0  # between two lines that tell how far it is
KEPT = ("jobs", "record", "losses")
INTERRUPTED = 130


class Run:
    """One storm, from the first worker to the last check."""

    def __init__(
        self, folder: Path, results: Results, disturbances: int, seed: int, processes: int, most_workers: int
    ) -> None:
        """``processes``: of each worker."""
        self._folder = folder
        self._results = results
        self._count = disturbances
        self._seed = seed
        self._each = processes
        self._ranges = ranges_up_to(most_workers)
        self._epochs = -(-disturbances * STEPS_PER_DISTURBANCE // STEPS_PER_EPOCH)
        self._story = Story()

    def run(self) -> bool:
        """Whether everything holds that is checked."""
        began = time.monotonic()
        home = {"ELASTICDL_HOME": str(self._folder), "WATCHED": str(self._folder)}
        with Processes(self._folder, home) as processes:
            network = Network(HOSTS, processes)
            with closing(Disk(self._folder / "disk")) as disk:
                job = LastingJob(processes, self._epochs, self._ranges[-1], self._each, network.hosts, disk.folder)
                try:
                    self._disturb(job, network, disk)
                    if self._each == 1:
                        _check_checkpoints(job.checkpoints, job.steps)
                    self._check(job, network, processes, time.monotonic() - began)
                except Failed as failure:
                    self._tell(failure, job)
                    return False
                finally:
                    job.close()
                    _wait_until_gone(processes)
        return True

    def _disturb(self, job: LastingJob, network: Network, disk: Disk) -> None:
        story, shown = self._story, time.monotonic()

        def progress() -> None:
            nonlocal shown
            if time.monotonic() - shown > LINE_SECONDS:
                shown, done = time.monotonic(), f"{story.counts.total()}/{self._count} disturbances"
                print(f"{done}, {len(job.world()['members'])} workers, step {job.step()}", flush=True)

        driver = Driver(job, network, disk, story, self._ranges, progress)
        try:
            job.pace(0.0)
            job.start_master()
            driver.run(schedule(self._seed, self._count, self._each))
        finally:
            driver.close()
        story.tell("the storm is over")
        job.finish()

    def _check(self, job: LastingJob, network: Network, processes: Processes, seconds: float) -> None:
        journal = job.journal.read()
        check_journal(journal)
        if left := [*_wait_until_gone(processes), *network.sockets_in_use(), *os.listdir(tempfile.gettempdir())]:
            raise Failed(f"left over: {', '.join(left)}")
        agreement = compare(job.losses.iterdir(), job.record.iterdir(), self._epochs)
        show(self._story, journal, agreement, self._results)
        worlds = sum(entry["event"] == "world_formed" for entry in journal)
        counts = {kind.name: count for kind, count in self._story.counts.items()}
        about = {"seed": self._seed, "processes": self._each, "disturbances": self._count, "counts": counts}
        self._results.add("storm", **about, seconds=round(seconds, 1), worlds=worlds, **asdict(agreement))
        print(f"seed {self._seed}: {self._count} disturbances, {worlds} worlds in {seconds:.0f} s; all holds")

    def _tell(self, failure: Failed, job: LastingJob) -> None:
        keep = self._results.path.parent / f"failed-storm-{self._seed}-{time.time():.0f}"
        for name in filter(lambda each: (self._folder / each).exists(), KEPT):
            ignored = shutil.ignore_patterns("*.tmp", "tls")
            shutil.copytree(self._folder / name, keep / name, ignore=ignored, dirs_exist_ok=True)
        for log in self._folder.glob("*.log"):
            shutil.copy(log, keep)
        write_story(keep / "story.txt", self._story, job.journal.read())
        self._results.add("failure", seed=self._seed, reason=str(failure))
        done = f"after {self._story.counts.total()} of {self._count} disturbances"
        print(
            f"seed {self._seed}: FAILED {done}: {failure}\nstory, logs, journal, losses and record: {keep}", flush=True
        )


def pauses_by_change(journal: Iterable[Entry], brought: Sequence[Brought]) -> dict[str, Summary]:
    """By what the worker says of the change; a failure by what was done then, too."""
    found: dict[str, list[float]] = defaultdict(list)
    for entry in journal:
        if entry["event"] == "pause":
            change = entry["kind"]
            found[change].append(entry["total"])
            if change == "failure":
                found[f"{change}: {_cause(entry['time'], brought)}"].append(entry["total"])
    return {change: summarise(seconds) for change, seconds in sorted(found.items())}


def _cause(at: float, brought: Sequence[Brought]) -> str:
    last = next((each for each in reversed(brought) if each.at <= at), None)
    return " and ".join(kind.name for kind in last.kinds) if last else "none"


def show(story: Story, journal: Sequence[Entry], agreement: Agreement, results: Results) -> None:
    rows = [[kind.name, kind.value, str(story.counts[kind])] for kind in Kind]
    rows.append(["", "all", str(story.counts.total())])
    show_table("Disturbances", ["kind", "", "n"], rows)
    for moment in story.brought:
        kinds = [kind.name for kind in moment.kinds]
        results.add("moment", disturbances=kinds, at=round(moment.at, 3), recovery=round(moment.recovery, 3))
    pauses = pauses_by_change(journal, story.brought)
    for change, each in pauses.items():
        results.add("pauses", change=change, **asdict(each))
    values = [[change, str(p.n), *(f"{v:.2f}" for v in (p.median, p.p90, p.p99, p.maximum))] for change, p in pauses.items()]  # fmt: skip
    show_table("Pauses of the survivors, s", ["change", "n", "median", "p90", "p99", "max"], values)
    print(
        f"{agreement.steps} steps, {agreement.samples} samples in {agreement.epochs} epochs, each once; "
        f"{agreement.losses_compared} losses seen by workers are those of an undisturbed run (largest difference "
        f"{agreement.largest_difference:.1e}, relative)"
    )


def write_story(path: Path, story: Story, journal: Iterable[Entry]) -> None:
    """What was done beside what the job says happened, in the order of time."""
    lines = sorted([*story.lines, *((entry["time"], f"    {dump_entry(entry)}") for entry in journal)])
    path.write_text("".join(f"{time - lines[0][0]:9.3f} s  {text}\n" for time, text in lines))


def _check_checkpoints(folder: Path, last: int) -> None:
    there = sorted(os.listdir(folder))
    if f"checkpoint-{last:010d}.pt" not in there or there[0].startswith("."):
        raise Failed(f"the checkpoints are {', '.join(there)}, and the last step was {last}")


def _wait_until_gone(processes: Processes) -> list[str]:
    """The processes that were started here, and by those, and do not go; but for the holders of namespaces."""
    own = {os.getpid(), *processes.pids}
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        children = psutil.Process(os.getppid()).children(recursive=True)
        left = [each for each in children if each.pid not in own and each.is_running()]
        if not left or time.monotonic() > deadline:
            return [f"process {each.pid} ({each.name()})" for each in left]
        time.sleep(0.05)


def main(folder: str, out: str, *numbers: str) -> int:
    results = Results("storm", Path(out))
    try:
        holds = Run(Path(folder), results, *map(int, numbers)).run()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        return INTERRUPTED
    print(f"results: {results.path}", flush=True)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
