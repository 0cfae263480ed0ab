"""A job's snapshot in a file of the job's folder, where the next master finds it: for a batch system whose nodes share the folder.

Writing is fenced: a master that finds another master's mark in the folder has been replaced, as after its node was cut off, and
writes no more. Another master may put its mark there between the look and the write: no shared file system has a lock that outlives
every node. Such a late write is lost and does no harm, as the successor reads only once, at its start.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from elasticdl.common.errors import ReplacedError, UnreachableError, UserError
from elasticdl.job.jobdir import JobDir, write_aside
from elasticdl.master.shell.saver import SnapshotStore
from elasticdl.master.state.snapshot import Snapshot

# The file system is everybody's, so it is written seldom.
NEWS_SECONDS = 5.0


class FileState(SnapshotStore):
    """``holder``: the mark of this master."""

    news_seconds = NEWS_SECONDS

    def __init__(self, job: JobDir, holder: str) -> None:
        self._path, self._journal = job.state, job.journal
        self._mark = job.holder
        self._holder = holder

    async def load(self) -> Snapshot | None:
        return await asyncio.to_thread(self._load)

    async def save(self, snapshot: Snapshot) -> None:
        await asyncio.to_thread(self._save, snapshot.to_json())

    def _load(self) -> Snapshot | None:
        try:
            write_aside(self._mark, self._holder)
            text = self._path.read_text() if self._path.exists() else ""
            snapshot = Snapshot.from_json(text) if text else None
            _cut(self._journal, snapshot.journal_bytes if snapshot else None)
        except ValueError as error:
            raise UserError(f"what an earlier master has left in {self._path.parent} can't be read: {error}") from None
        except OSError as error:  # as of a disk that is full
            raise UnreachableError(f"can't take the job over in {self._path.parent}: {error.strerror}") from None
        return snapshot

    def _save(self, text: str) -> None:
        if self._mark.read_text() != self._holder:
            raise ReplacedError("another master has taken over")
        write_aside(self._path, text)


def _cut(journal: Path, end: int | None) -> None:
    """Cut the journal to its length at the snapshot. Workers tell again what came later, so each entry is there once.

    The journal becomes another file: a master that was cut off may still write to the old one, and readers see that it begins anew.

    ``end``: in bytes; None: all whole lines.
    """
    if journal.exists():
        content = journal.read_bytes()
        end = content.rfind(b"\n") + 1 if end is None else end
        write_aside(journal, content[:end].decode(errors="replace"))
