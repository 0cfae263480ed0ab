"""The logs of a job of this machine, merged in the order of time."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Mapping

from elasticdl.cli.tail import Tail
from elasticdl.common.jobdir import JobDir

TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d*")


def log_names(job: JobDir) -> list[str]:
    """Who has written a log: the master, then the workers by number."""
    return in_order(path.stem for path in job.logs.glob("*.log"))


def in_order(names: Iterator[str]) -> list[str]:
    return sorted(names, key=lambda name: (name != "master", len(name), name))


class LogReader:
    """All logs of a job, or one worker's; logs that appear later are taken up. See `elasticdl.cli.handle.Growing`."""

    def __init__(self, job: JobDir, worker: int | None, grows: Callable[[], bool]) -> None:
        self._job = job
        self._only = None if worker is None else job.worker_log(worker).stem
        self._grows = grows
        self._tails: dict[str, Tail] = {}

    def lines(self) -> list[str]:
        names = [self._only] if self._only else log_names(self._job)
        for name in names:
            self._tails.setdefault(name, Tail(self._job.logs / f"{name}.log"))
        return merged({prefix(name, self._only): self._tails[name].lines() for name in names})

    def may_grow(self) -> bool:
        return self._grows()

    def last_words(self) -> list[str]:
        return [prefix(name, self._only) + line for name, tail in self._tails.items() for line in tail.last_words()]


def prefix(name: str, only: str | None) -> str:
    return "" if only else f"{name:9} | "


def merged(written: Mapping[str, list[str]]) -> list[str]:
    """Lines by their prefix, in the order of time as far as they tell it."""
    streams = (dated(start, lines) for start, lines in written.items())
    return [line for _, line in heapq.merge(*streams, key=lambda item: item[0])]


def dated(start: str, lines: list[str]) -> Iterator[tuple[str, str]]:
    """Each line with the time that it, or a line before it, begins with."""
    moment = ""
    for line in lines:
        found = TIMESTAMP.match(line)
        moment = found[0].replace("T", " ").replace(",", ".") if found else moment
        yield moment, start + line
