"""Attributes of a data set of the script's own: its order, generators, a difficulty that a callback raises.

They belong to the job. All workers take those of rank 0 between two epochs, and a newcomer takes them before its first step.
What changes where samples are read, such as an open file or a cache, stays each worker's own; generators do not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.keras.callback_state import KINDS
from elasticdl.elastic.training import attributes, plain_data
from elasticdl.elastic.training.attributes import CONTENT, OF_THE_WORKER, Spot, is_scripts_own
from elasticdl.elastic.training.consensus import from_root, of_all

MOST_BYTES = 2**24  # of an attribute that is sent
PLACES = 64  # in which a larger array is looked at

Attributes = dict[str, Any]

log = logging.getLogger(__name__)


class DataAttributes:
    """Of one data set, from before anything is read of it; there are none of what is no object of the script's own."""

    def __init__(self, source: Any) -> None:
        kind: Any = type(source)
        self.is_empty = not is_scripts_own(kind) or not hasattr(source, "__dict__")
        self._source = source
        self._first: dict[str, int] = {}
        self._own: set[str] = set()  # changed where samples are read
        self._named: set[str] = set()
        self._before_reading: dict[str, int] | None = self._marks()

    def have_read(self) -> None:
        """The first samples have been read, and no hook was called yet."""
        if self._before_reading is not None:
            now = self._marks()
            self._own |= {path for path, mark in now.items() if self._before_reading.get(path) != mark}
            self._own = {path for path in self._own if not path.startswith(CONTENT)}
            self._before_reading, self._first = None, now

    def taken(self) -> Attributes:
        """What a newcomer or a resumed training needs: what has changed, and generators. Nothing may be loaded meanwhile.

        What has not is as the worker has made it, such as the name of a folder of its own.
        """
        self.have_read()
        found = {}
        for spot in self._spots():
            value = spot.taken()
            if spot.content is None and _mark(value) == self._first.get(spot.path):
                continue
            if plain_data.size_of(value, MOST_BYTES) <= MOST_BYTES:
                found[spot.path] = value
            elif spot.path not in self._named:
                self._named.add(spot.path)
                log.warning(
                    "the data set %s changes %s, which has more than %d MiB and is not sent to workers that join: keep less in it",
                    type(self._source).__name__,
                    spot.path.removeprefix(CONTENT),
                    MOST_BYTES >> 20,
                )
        return found

    def put(self, kept: Mapping[str, Any]) -> None:
        """What another worker has taken."""
        for path, value in kept.items():
            attributes.put(self._source, path, value, KINDS)

    def agree(self, collective: Collective) -> None:
        """Have all members keep what rank 0 keeps.

        Raises:
            WorldBroken: a member was lost meanwhile.
        """
        if self.is_empty or collective.world.size == 1:
            return
        mine = plain_data.loads(plain_data.dumps(self.taken()))  # as the others receive it
        mark = plain_data.checksum(mine)
        differs = mark != from_root(collective, mark, "elasticdl.data.mark")
        if any(of_all(collective, differs, "elasticdl.data.marks")):
            roots = from_root(collective, mine, "elasticdl.data.attributes")
            if differs:
                self.put(roots)

    def _spots(self) -> Iterator[Spot]:
        if self.is_empty:
            return
        for spot in attributes.spots(self._source, KINDS):
            if spot.travels and spot.path not in self._own and not OF_THE_WORKER.search(str(spot.key)):
                yield spot

    def _marks(self) -> dict[str, int]:
        return {spot.path: _mark(spot.taken()) for spot in self._spots()}


def _mark(value: Any) -> int:
    """Of what is large, and not one array, only how large it is."""
    if plain_data.size_of(value, MOST_BYTES) <= MOST_BYTES:
        return plain_data.checksum(value)
    if isinstance(value, np.ndarray) and value.ndim:
        return plain_data.checksum(value[np.linspace(0, len(value) - 1, PLACES).astype(int)])
    return len(value) if hasattr(value, "__len__") else 0
