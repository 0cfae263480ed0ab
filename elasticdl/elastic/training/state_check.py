"""Whether all members hold the same training state, piece by piece.

Before the first step of each world and of each epoch every member makes a checksum of its pieces; the step's vote tells
whether all are equal. Only if they are not are the pieces compared, once the step is made: first their checksums, by name,
then how far those that differ are apart. Processors of different kinds round differently, so up to `ROUNDING` everybody
takes rank 0's state; above it the job ends with a line that names the piece.
"""

from __future__ import annotations

import json
import logging
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticdl.common.errors import UserError
from elasticdl.common.option_values import CHECK_OFF, CHECK_REPAIR
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.agreement import plain_text
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.progress import Progress

Array = npt.NDArray[Any]
Pieces = Mapping[str, Array]
# Part of the largest value of a piece by which it may differ for no other reason than other processors.
ROUNDING = 1e-3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a piece, between rank 0's worker and another. ``distance``: part of rank 0's largest value; infinite for what is no
    number, or of another shape."""

    piece: str
    worker: int
    distance: float

    def __str__(self) -> str:
        by = f" by {self.distance:.2g} of its largest value" if np.isfinite(self.distance) else ""
        return f"{self.piece} differs{by}"


class StateCheck:
    """Of one training state; on all members at the same steps."""

    def __init__(
        self,
        how: str,
        worker_id: int,
        collective: Collective,
        pieces: Callable[[], Pieces],
        take_over: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        """``how``: as ``--check_state``. ``take_over``: on all members, be at rank 0's state. ``tell``: for the journal."""
        self._each = int(how) if how.isdigit() else 0
        self._is_on = how != CHECK_OFF
        self._always_repairs = how == CHECK_REPAIR
        self._worker_id = worker_id
        self._collective = collective
        self._pieces = pieces
        self._take_over = take_over
        self._tell = tell
        self._seen = (-1, -1)  # world and epoch, or number of steps, of the last comparison
        self._is_due = False
        self._agreed = -1  # step after which all were equal
        self._told = False
        self.checksum = 0  # for the vote of the step that begins; 0 if nothing is compared in it

    def begin(self, progress: Progress) -> None:
        """A step begins: nothing of the state has been touched."""
        world = self._collective.world
        place = (world.version, progress.step // self._each if self._each else progress.epoch)
        self.checksum = 0
        if self._is_on and world.size > 1 and place != self._seen:
            self._seen = place
            self.checksum = _checksum(self._pieces())

    def voted(self, *, one_state: bool) -> None:
        self._is_due = self._is_due or not one_state

    def step_made(self, step: int) -> None:
        """All members come here after the same step.

        Raises:
            UserError: their states differ.
        """
        if self.checksum and not self._is_due:
            self._agreed = step - 1
        if not self._is_due:
            return
        self._is_due = False
        try:
            self._compare(step)
        except WorldBroken as failure:  # the next step finds that as well, where it can be mended
            log.info("the states were not compared: %s", failure)

    def _compare(self, step: int) -> None:
        pieces = self._pieces()
        others = self._gathered({name: zlib.crc32(_bytes(array)) for name, array in pieces.items()}, "sums")
        names = self._from_root(sorted({name for each in others for name in _other(others[0], each)}))
        root = self._from_root({name: pieces[name] for name in names if name in pieces})
        mine = [(name, _distance(root.get(name), pieces.get(name))) for name in names]
        told = self._gathered([self._worker_id, mine], "distances")
        every = [Difference(name, worker, each) for worker, found in told for name, each in found if each]
        found = self._from_root([(each.piece, each.worker, each.distance) for each in every])
        differences = sorted((Difference(*each) for each in found), key=lambda each: -each.distance)
        if not differences:
            return
        if self._always_repairs or differences[0].distance <= ROUNDING:
            self._take_over()
            self._tell_once(step, differences[0])
            return
        # A setting that differs is rather the cause than what has come of it.
        differences.sort(key=lambda each: each.piece not in pieces or pieces[each.piece].size > 1)
        raise UserError(self._line(step, self._from_root(self._worker_id), differences))

    def _tell_once(self, step: int, largest: Difference) -> None:
        if not self._told and self._collective.world.rank == 0:
            self._tell(f"after step {step} the workers' states were not the same, {largest}: all have taken rank 0's")
        self._told = True

    def _line(self, step: int, first: int, differences: list[Difference]) -> str:
        pieces = list(dict.fromkeys(each.piece for each in differences))
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        since = (
            f"after step {self._agreed} they were the same" if self._agreed >= 0 else "they were not compared before"
        )
        worker = differences[0].worker
        return (
            f"after step {step} worker {first} and worker {worker} hold different states: {differences[0]}{more}; {since}: "
            "is something set or drawn on one worker only, as in a callback, a hook or a layer? What all workers hold must be "
            "computed alike on all (docs/reliability.md)"
        )

    def _gathered(self, value: Any, name: str) -> list[Any]:
        """Of all members by rank, on rank 0; elsewhere nothing but this member's."""
        content = np.frombuffer(bytearray(json.dumps(value).encode()), np.uint8)
        told = self._collective.gather(content, f"elasticdl.state.{name}")
        return [json.loads(each.tobytes()) for each in told] or [value]

    def _from_root(self, value: Any) -> Any:
        return pickle.loads(self._collective.broadcast_bytes(pickle.dumps(value), "elasticdl.state"))


def as_array(value: Any) -> Array:
    """What is no array, such as a setting of an optimizer: numbers as they are, anything else as text."""
    is_number = isinstance(value, int | float | np.number)
    return np.asarray(value) if is_number else np.frombuffer(plain_text(value).encode(), np.uint8)


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """All that a nested value holds, each with a name that begins with ``name``."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(f"{name}.{key}", each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from leaves(f"{name}.{number}", each)
    else:
        yield name, value


def _checksum(pieces: Pieces) -> int:
    """Never 0."""
    found = 0
    for name, array in pieces.items():
        found = zlib.crc32(_bytes(array), zlib.crc32(f"{name} {array.shape}".encode(), found))
    return found | 1 << 31


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _other(mine: Mapping[str, int], theirs: Mapping[str, int]) -> set[str]:
    return {name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name)}


def _distance(root: Array | None, mine: Array | None) -> float:
    if root is None or mine is None or root.shape != mine.shape:
        return float("inf")
    if root.dtype.kind not in "fc" or mine.dtype != root.dtype:
        return 0.0 if np.array_equal(root, mine) else float("inf")
    wide = np.float64 if root.dtype.kind == "f" else np.complex128
    apart = np.abs(root.astype(wide) - mine.astype(wide))
    same = (root == mine) | (np.isnan(root) & np.isnan(mine))
    largest = float(np.max(apart, where=~same, initial=0.0))
    scale = float(np.max(np.abs(root), where=np.isfinite(root), initial=0.0))
    return largest / scale if scale and np.isfinite(largest) else (0.0 if largest == 0.0 else float("inf"))
