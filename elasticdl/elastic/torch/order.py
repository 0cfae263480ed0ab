"""The order in which the samples of an epoch are trained on, as it is drawn on a worker."""

from __future__ import annotations

from elasticdl.elastic.torch_kit.data.own_loader import GlobalBatch, OwnLoader, RandomStreams, streams
from elasticdl.elastic.torch_kit.participant.script_position import EpochBegin, ScriptPosition


class Order:
    """Of the present epoch."""

    def __init__(self, batches: OwnLoader) -> None:
        self.drawn: list[GlobalBatch] = []
        self.outside = streams()  # random streams, as the script knows them outside its loop over batches
        self._batches = batches
        self._from: EpochBegin | None = None

    def draw(self, epoch: int, jobs: ScriptPosition | None) -> None:
        """``jobs``: where the job stands, on a worker that is on its way there."""
        if jobs is not None:
            theirs, ours = jobs.begin_of(epoch), self._from
            if ours is not None and ours.epoch == epoch and theirs in (ours, None):  # drawn again it may be another one
                return
            jobs.put_back(epoch, self._batches.draws)
        self._from = EpochBegin(epoch, RandomStreams.capture(), self._batches.draws.capture())
        self.drawn = self._batches.of_epoch(epoch)
        self.outside = streams()
