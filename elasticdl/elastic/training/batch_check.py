"""Whether all members make each step on the same samples of the same data.

The vote of a step tells whether they do; only if they do not, each tells what it believes. In the first step of a world the
data are part of that, as not every front end knows them when a worker comes in.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable

import numpy as np

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.agreement import BatchFacts, Disagreement, newcomers_alone
from elasticdl.elastic.core.position import Position
from elasticdl.elastic.core.progress import StepPlan
from elasticdl.elastic.training.data_facts import DataFacts


class BatchCheck:
    """Of one training state."""

    def __init__(self, collective: Collective, facts: Callable[[], DataFacts]) -> None:
        self._collective = collective
        self._facts = facts
        self._first = (0, 0)  # step of a world, by its version: in it the data are compared, however often it is made

    def ballot(self, plan: StepPlan | None) -> int:
        """For the vote of the step that is made by this plan; 0 if nobody knows one."""
        if plan is None:
            return 0
        place = self._collective.world.version, plan.step
        if place[0] != self._first[0]:
            self._first = place
        if place != self._first:
            return plan.checksum
        return plan.checksum ^ zlib.crc32(repr(self._facts().sources).encode())

    def difference(self, position: Position) -> str:
        """What differs between the batches, or the data, of the members, who all ask for it now. Empty if it is rounding alone.

        Raises:
            UserError: this worker is refused, as it came later and has others than the rest.
            WorldBroken: another worker is.
        """
        facts, plan, progress = self._facts(), position.batch, position.progress
        epoch, step, samples = (plan.epoch, plan.step, plan.whole) if plan else (progress.epoch, progress.step + 1, ())
        mine = BatchFacts.of(facts.worker, epoch, step, samples, trained=position.made > 0)
        told = self._collective.gather(_packed((mine, facts)), "elasticdl.batches")
        every = [pickle.loads(each.tobytes()) for each in told]  # of other members of the same job
        data = [theirs.differs(every[0][1]) for _, theirs in every]
        judged = Disagreement.of([batch for batch, _ in every], data) if every else None
        said = self._collective.broadcast_bytes(pickle.dumps(judged), "elasticdl.difference")
        found: Disagreement = pickle.loads(said)
        found.refuse(mine.worker)
        return found.line


def require_one(collective: Collective, worker: int, mine: str, line: str, *, trained: bool) -> None:
    """As `judge`; who is not refused does not go on either if it differs.

    Raises:
        UserError: it differs.
        WorldBroken: another worker is refused.
    """
    if judge(collective, worker, mine, line, trained=trained):
        raise UserError(line)


def judge(collective: Collective, worker: int, mine: str, line: str, *, trained: bool) -> bool:
    """Whether it differs, where nobody is refused. All members come here with what has to be the same.

    ``line``: what is to be said of who is refused. ``trained``: this worker has made a step of the job before.

    Raises:
        UserError: this worker is refused, as it came later and has another than the rest.
        WorldBroken: another worker is.
    """
    every = collective.gather(_packed((worker, trained, mine)), "elasticdl.others")
    told = [pickle.loads(each.tobytes()) for each in every]
    others = {number for number, _, text in told if text != told[0][2]}
    refused = newcomers_alone([each[:2] for each in told], others) if others else ()
    said = collective.broadcast_bytes(pickle.dumps((bool(others), refused)), "elasticdl.refused")
    differ, refused = pickle.loads(said)
    Disagreement(line, refused).refuse(worker)
    return bool(differ)


def _packed(value: object) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(bytearray(pickle.dumps(value)), np.uint8)
