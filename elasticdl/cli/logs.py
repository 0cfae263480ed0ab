"""``elasticdl logs``: what the master and the workers of a job wrote, each line under its writer's name."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Iterator, Sequence

from elasticdl.cli.jobs import Life, find_job, life_of
from elasticdl.cli.parser import Parser
from elasticdl.cli.tail import Tail, looks
from elasticdl.common.errors import UserError
from elasticdl.common.jobdir import JobDir

TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d*")


def command(argv: Sequence[str]) -> int:
    parser = Parser("logs", "Show the logs of a job's master and workers.")
    parser.add_argument("job", nargs="?", help="name of the job; may be left out if only one runs")
    parser.add_argument("--worker", type=int, metavar="N", help="only this worker's, as it wrote it")
    parser.add_argument("--follow", action="store_true", help="go on until the job has ended")
    given = parser.parse(argv)
    job = find_job(given.job)
    if given.worker is not None and not given.follow and not job.worker_log(given.worker).exists():
        raise UserError(f"job {job.name} has no worker {given.worker}; it has logs of {', '.join(sources(job))}")
    reader = LogReader(job, given.worker)
    for _ in looks(lambda: given.follow and life_of(job, time.time()) in (Life.STARTING, Life.RUNNING)):
        for line in reader.new_lines():
            print(line, flush=given.follow)
    for line in reader.last_words():
        print(line)
    return 0


def sources(job: JobDir) -> list[str]:
    """Who has written a log: the master, then the workers by number."""
    found = [path.stem for path in job.logs.glob("*.log")]
    return sorted(found, key=lambda name: (name != "master", len(name), name))


class LogReader:
    """All logs of a job, or one worker's; logs that appear later are taken up."""

    def __init__(self, job: JobDir, worker: int | None) -> None:
        self._job = job
        self._only = None if worker is None else job.worker_log(worker).stem
        self._tails: dict[str, Tail] = {}

    def new_lines(self) -> Iterator[str]:
        """What has come since the last look, in the order of time as far as the lines tell it."""
        names = [self._only] if self._only else sources(self._job)
        for name in names:
            self._tails.setdefault(name, Tail(self._job.logs / f"{name}.log"))
        streams = [dated(self._prefix(name), self._tails[name].lines()) for name in names]
        return (line for _, line in heapq.merge(*streams, key=lambda item: item[0]))

    def last_words(self) -> Iterator[str]:
        for name, tail in self._tails.items():
            for line in tail.last_words():
                yield self._prefix(name) + line

    def _prefix(self, name: str) -> str:
        return "" if self._only else f"{name:9} | "


def dated(prefix: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Each line with the time that it, or a line before it, begins with."""
    moment = ""
    for line in lines:
        found = TIMESTAMP.match(line)
        moment = found[0].replace("T", " ").replace(",", ".") if found else moment
        yield moment, prefix + line
