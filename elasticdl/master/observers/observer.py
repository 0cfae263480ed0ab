"""Those who are told what happens to a job, and have no say in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticdl.master.core import events as e

PAUSE_PARTS = ("notice", "drain", "rendezvous", "init", "sync", "first_step", "total")


class Observer:
    """Hears of what it does not ignore, on the master's event loop; no method waits or raises."""

    def observe(self, event: e.Event) -> None:
        """Everything that the core is told, before it acts on it."""

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        """Every entry of the journal that this master makes; `elasticdl.common.journal.EVENTS` names them."""

    def world_formed(self, size: int) -> None:
        """A world of so many members begins, or goes on under this master."""

    def close(self) -> None:
        """Nothing more happens."""


class Observers(Observer):
    """Several as one."""

    def __init__(self, boards: Sequence[Observer]) -> None:
        self._boards = tuple(boards)

    def observe(self, event: e.Event) -> None:
        for board in self._boards:
            board.observe(event)

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        for board in self._boards:
            board.recorded(event, fields)

    def world_formed(self, size: int) -> None:
        for board in self._boards:
            board.world_formed(size)

    def close(self) -> None:
        for board in self._boards:
            board.close()
