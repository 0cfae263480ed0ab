"""What an experiment leaves in --out. A file appears whole, or grows line by line; none is ever half of a new one."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.job.journal import Entry, dump_entry, plain


@dataclass(frozen=True, slots=True)
class Artefacts:
    """``circumstances``: what a summary says besides the results."""

    folder: Path
    circumstances: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Within, no other experiment writes there.

        Raises:
            UserError: another does already.
        """
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UserError(f"--out {self.folder}: an experiment that runs writes there; choose another") from None
        finally:
            os.close(folder)

    def journal(self, name: str, entries: Iterable[Entry]) -> None:
        self.text(f"{name}.jsonl", "".join(f"{dump_entry(entry)}\n" for entry in entries))

    def summary(self, content: Mapping[str, Any]) -> None:
        """Numbers are kept to six digits."""
        whole = plain(_rounded({**content, **self.circumstances}))
        self.text("summary.json", json.dumps(whole, indent=1) + "\n")

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
        """As CSV."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
        self.text(f"{name}.csv", text.getvalue())

    def text(self, name: str, text: str) -> None:
        self._replace(name, lambda path: path.write_bytes(text.encode()))

    def figure(self, name: str, save: Callable[[Path], None]) -> None:
        """``save`` writes to the path that it is given, in the format of its ending."""
        for ending in ("svg", "pdf", "png"):
            self._replace(f"{name}.{ending}", save)

    def discard(self, *patterns: str) -> None:
        """Results of an earlier run would pass for those of this one, if it is interrupted. Not before it can begin."""
        for pattern in patterns:
            for path in self.folder.glob(pattern):
                path.unlink()

    def _replace(self, name: str, write: Callable[[Path], object]) -> None:
        scratch = self.folder / f".{os.getpid()}.{name}"
        try:
            write(scratch)
            scratch.replace(self.folder / name)
        finally:
            scratch.unlink(missing_ok=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
