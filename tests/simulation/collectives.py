"""The collectives of the workers' worlds: complete only when all members take part, and broken for each by itself.

When a world breaks while a result is on its way, some members have it and the others see a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elasticdl.elastic.core.protocol import World
from tests.simulation.clock import Clock
from tests.simulation.lineage import Violation

LATENCY = 0.004  # of a collective
SPREAD = 0.004  # between the first member that has the result and the last
TORN_SHARE = 0.6  # of the results that are on their way when a world breaks
CONNECT_TIMEOUT = 6.0
SAME_COLLECTIVE = "the members of a world make the same collectives in the same order"
FAILED = object()  # what a member gets instead of a result


Resume = Callable[[Any], None]


@dataclass(slots=True)
class _Operation:
    kind: str
    inputs: dict[int, Any] = field(default_factory=dict)  # by worker
    waiting: dict[int, Resume] = field(default_factory=dict)
    result: Any = None
    complete: bool = False


@dataclass(slots=True)
class _Ring:
    """The collective of one world, as it was first published."""

    root: int
    size: int
    broken: bool = False
    to_be_torn: bool = False  # at the next result
    made: dict[int, int] = field(default_factory=dict)  # operations that each member has begun
    operations: dict[int, _Operation] = field(default_factory=dict)

    def never_fails(self, kind: str) -> bool:
        """Who is alone sums nothing."""
        return self.size == 1 and kind == "step"


class Collectives:
    def __init__(self, clock: Clock, draw: random.Random) -> None:
        self._clock = clock
        self._draw = draw
        self._rings: dict[int, _Ring] = {}

    def take_part(
        self, member: int, resume: Resume, world: World, kind: str, given: Any, combine: Callable[[dict[int, Any]], Any]
    ) -> None:
        """The member, which has this number, is resumed with the combined inputs of all, or with `FAILED`."""
        ring = self._rings.get(world.version)
        if ring is None or (ring.root, ring.size) != (world.root.worker_id, world.size):
            ring = self._rings[world.version] = _Ring(world.root.worker_id, world.size)
        number = ring.made.get(member, 0)
        ring.made[member] = number + 1
        if ring.broken and not ring.never_fails(kind):
            self._clock.after(self._draw.uniform(0, SPREAD), resume, FAILED)
            return
        operation = ring.operations.setdefault(number, _Operation(kind))
        if operation.kind != kind:
            text = f"in world {world.version} worker {member} is in {kind!r} and others in {operation.kind!r}"
            raise Violation(SAME_COLLECTIVE, text)
        operation.inputs[member] = given
        operation.waiting[member] = resume
        if len(operation.inputs) == ring.size:
            operation.result, operation.complete = combine(operation.inputs), True
            self._spread(ring, operation)
            ring.operations.pop(number - 1, None)
        elif kind == "connect":
            self._clock.after(CONNECT_TIMEOUT, self._time_out, ring, operation)

    def break_world(self, version: int) -> None:
        """Whoever takes part in it now or later fails."""
        ring = self._rings.get(version)
        if ring is None or ring.broken:
            return
        ring.broken = True
        for operation in ring.operations.values():
            for member, resume in sorted(operation.waiting.items()):
                if ring.never_fails(operation.kind):
                    continue
                if not operation.complete or self._draw.random() < TORN_SHARE:
                    del operation.waiting[member]
                    self._clock.after(self._draw.uniform(0, 5 * SPREAD), resume, FAILED)

    def lose(self, worker_id: int) -> None:
        """A process is gone: the others see their connections to it close, if there were any."""
        for version, ring in self._rings.items():
            if worker_id in ring.made and not ring.broken:
                self._clock.after(self._draw.uniform(0, SPREAD), self.break_world, version)

    def tear(self, version: int) -> None:
        """At the next result, or the one that is on its way."""
        if ring := self._rings.get(version):
            ring.to_be_torn = True

    def _time_out(self, ring: _Ring, operation: _Operation) -> None:
        if not (operation.complete or ring.broken):
            self.break_world(next(version for version, each in self._rings.items() if each is ring))

    def _spread(self, ring: _Ring, operation: _Operation) -> None:
        for member in operation.waiting:
            self._clock.after(LATENCY + self._draw.uniform(0, SPREAD), self._deliver, operation, member)
        if ring.to_be_torn:
            version = next(version for version, each in self._rings.items() if each is ring)
            self._clock.after(LATENCY + self._draw.uniform(0, SPREAD), self.break_world, version)

    def _deliver(self, operation: _Operation, member: int) -> None:
        if resume := operation.waiting.pop(member, None):
            resume(operation.result)
