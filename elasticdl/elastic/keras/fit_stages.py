"""Several calls of ``fit`` in one script: each is a stage, and all members of a world train in the same one.

A newcomer runs the script from its top, so it comes to the first ``fit`` while the others may be in a later one. In the
first world that it enters it is handed the history of each stage that the others have ended.
Then all leave that world, and the newcomer runs on to the present stage on its own: each ``fit`` that is over returns at once, with
that history. The model's weights come with the present stage only. The others wait for it in the next world, not longer than
for any worker that makes no progress.

A member that was lost in the very end of a stage, after others had passed it, ends that stage by itself.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from elasticdl.common.errors import JobFailedError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import ALONE, StageSuperseded, WorldChanged
from elasticdl.elastic.keras.driver import FOREIGN
from elasticdl.elastic.training.attributes import plain_values, put
from elasticdl.elastic.training.evaluation import from_root, of_all
from elasticdl.tensorflow import keras


class Stages:
    """The calls of ``fit``, as one process has seen them. Stages are counted from 1."""

    def __init__(self) -> None:
        # Of the stages that are over: what they have left behind, as far as this process knows.
        self._records: list[dict[str, Any]] = []
        self._passed = 0  # stages that this process has left
        self.progress = Progress()  # steps and samples of all stages so far
        self.has_state = False  # this process trained to the end of the last stage

    @property
    def present(self) -> int:
        """The stage that this process is in, or comes to next."""
        return self._passed + 1

    @property
    def overtaken(self) -> bool:
        """The others have ended that stage already."""
        return len(self._records) > self._passed

    def end(self, history: keras.callbacks.History, told: int, progress: Progress) -> None:
        """This process has trained to the end of the present stage. ``told``: calls of its data set's hooks."""
        self._records[self._passed :] = [deepcopy({"history": plain_values(history, FOREIGN), "told": told})]
        self._passed += 1
        self.progress, self.has_state = progress, True

    def repeat(self, history: keras.callbacks.History) -> int:
        """Leave behind what the present stage, which is over, left behind on the others; returns the calls of its data set's hooks."""
        record = self._records[self._passed]
        put(history, deepcopy(record["history"]))
        self._passed += 1
        self.has_state = False
        told: int = record["told"]
        return told

    def meet(self, collective: Collective) -> None:
        """See that all members of the world are in the same stage, before anything else is done in it.

        Raises:
            StageSuperseded: the others have ended this stage.
            WorldChanged: another member has to catch up; join the next world.
            WorldBroken: a member was lost meanwhile.
            JobFailedError: nobody is left who holds the state.
        """
        world = collective.world
        if world == ALONE:
            return
        if self.present > 1 and world.is_first:
            raise JobFailedError(
                f"all workers that had begun fit() number {self.present} were lost; start the job anew"
            )
        if world.size == 1:
            return
        stages = list(map(int, of_all(collective, self.present, "elasticdl.stages")))
        newest, oldest = max(stages), min(stages)
        if oldest == newest:
            return
        if stages[0] == newest:
            self._hand_over(collective, oldest - 1)
        if self.overtaken or (self.present < newest and world.own.has_state):
            raise StageSuperseded(f"the others are at fit() number {newest} already")
        raise WorldChanged(f"a worker has to catch up to fit() number {newest}")

    def _hand_over(self, collective: Collective, first: int) -> None:
        is_root = collective.world.rank == 0
        missed = from_root(collective, self._records[first:] if is_root else [], "elasticdl.records")
        self._records += missed[len(self._records) - first :]
