"""What the workers of a job in a folder print: their files, and which of them go to which stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from elasticdl.cli.printed import Printers, Prints
from elasticdl.cli.screens import Outlet, Screen, Stream
from elasticdl.job.jobdir import JobDir
from elasticdl.job.journal import Entry
from elasticdl.job.spec import JobSpec

CHUNK = 1 << 18
# The files of a worker, by the streams that they are shown on.
Files = Mapping[Stream, Callable[[int], Path]]


class FileSource:
    """What is written to a file, which need not be there yet. A `elasticdl.cli.printed.Source`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def chunks(self) -> Iterator[bytes]:
        """Not kept in memory: there may be much of it."""
        with suppress(FileNotFoundError):
            end = self._path.stat().st_size
            if self._position >= end:
                return
            with self._path.open("rb") as file:
                file.seek(self._position)
                while self._position < end and (data := file.read(min(CHUNK, end - self._position))):
                    self._position += len(data)
                    yield data


class FilePrinters(Printers):
    def __init__(self, job: JobDir, files: Files) -> None:
        self._job = job
        self._files = files
        self._known: Sequence[int] = ()

    def hear(self, entry: Entry) -> None:
        """Files are found by their names."""

    def known(self) -> Iterable[int]:
        return self._known

    def sources(self, worker: int) -> Mapping[Stream, FileSource]:
        return {stream: FileSource(path_of(worker)) for stream, path_of in self._files.items()}

    def collect(self, workers: Collection[int] | None, *, to_end: bool) -> str:
        if workers is None:
            names = (re.fullmatch(r"worker-(\d+)\.log", path.name) for path in self._job.logs.glob("worker-*.log"))
            self._known = sorted(int(name[1]) for name in names if name)
        return ""

    def close(self) -> None:
        """Nothing is open."""


def apart(spec: JobSpec, out: Outlet, err: Outlet) -> bool:
    """Whether what workers print on stdout has a file of its own.

    Where both outlets are one, both streams are one file, too: so all lines keep their order. Of a module's worker the log is its own.
    """
    return not spec.command or not out.ends_at(err)


def local_prints(job: JobDir, spec: JobSpec, screen: Screen, out: Outlet, err: Outlet) -> Prints:
    """What ``--log_ranks`` asks for; where it goes depends on where these outlets lead."""
    is_apart = apart(spec, out, err)
    files = {Stream.OUT: job.worker_out if is_apart else job.worker_log}
    if is_apart and spec.command:
        files[Stream.ERR] = job.worker_log
    shares_place = out.is_terminal or out.ends_at(err)
    return Prints(spec.shown_ranks(), screen, FilePrinters(job, files), with_newlines=shares_place)
