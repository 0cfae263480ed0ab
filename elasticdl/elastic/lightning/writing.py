"""What rank 0 alone does, whichever worker that is: it writes files, shows the progress bar, and tells the job of validations and checkpoints."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

from elasticdl.elastic.torch_kit.torch_job import ElasticContext

# Before there is a world nobody writes: which worker is to do that is not known.
NOBODY = 1


class Writing:
    """Tells Lightning of this worker's rank."""

    def __init__(self, trainer: Any, rank_zero_only: Any) -> None:
        self.rank = NOBODY
        self._trainer = trainer
        self._rank_zero_only = rank_zero_only
        rank_zero_only.rank = NOBODY

    def take_rank(self, rank: int, *, is_first: bool, goes_on: bool = False) -> None:
        """``is_first``: the world is the job's first. ``goes_on``: with the training of an earlier job, which has written files."""
        if rank == self.rank:
            return
        self.rank = self._rank_zero_only.rank = rank
        if rank == 0:
            if goes_on or not is_first:
                self._put_files_aside()
            if is_first:
                self._say_what_was_not_said()

    def stop(self) -> None:
        """This worker leaves; another writes from now on."""
        if self.rank == 0:
            for logger in self._trainer.loggers:
                logger.save()
        self.rank = self._rank_zero_only.rank = NOBODY

    def _say_what_was_not_said(self) -> None:
        """What Lightning has rank 0 write before the loops begin."""
        trainer = self._trainer
        bar = trainer.progress_bar_callback
        if bar is not None:
            bar.enable()
        for callback in trainer.callbacks:
            if any(kind.__name__ == "ModelSummary" for kind in type(callback).__mro__):
                callback.on_fit_start(trainer, trainer.lightning_module)
        for logger in trainer.loggers:
            module, data = trainer.lightning_module, trainer.datamodule
            if module._log_hyperparams or (data is not None and data._log_hyperparams):
                logger.log_hyperparams({**dict(data.hparams if data is not None else {}), **dict(module.hparams)})
            logger.log_graph(module)
            logger.save()

    def _put_files_aside(self) -> None:
        """A CSVLogger that begins would remove what the last rank 0 has written."""
        for logger in self._trainer.loggers:
            path = Path(getattr(logger, "log_dir", None) or "", "metrics.csv")
            if any(kind.__name__ == "CSVLogger" for kind in type(logger).__mro__) and path.is_file():
                free = (path.with_stem(f"metrics_{number}") for number in count())
                path.rename(next(each for each in free if not each.exists()))


class Told:
    """So that their time does not count as training."""

    def __init__(self, trainer: Any, job: ElasticContext) -> None:
        self._trainer = trainer
        self._job = job
        self._began = 0.0
        self._before: dict[str, Any] = {}  # metrics

    def validation_begins(self) -> None:
        self._began, self._before = time.monotonic(), dict(self._trainer.callback_metrics)

    def validation_ends(self) -> None:
        trainer = self._trainer
        if trainer.is_global_zero and not trainer.sanity_checking:
            found = trainer.callback_metrics.items()
            metrics = {name: float(value) for name, value in found if value is not self._before.get(name)}
            about = {"step": trainer.global_step, "epoch": trainer.current_epoch}
            self._job.tell_work("evaluation", **about, metrics=metrics, seconds=time.monotonic() - self._began)

    def saved(self, path: str, seconds: float) -> None:
        if self._trainer.is_global_zero:
            step = self._trainer.global_step
            self._job.tell_work("checkpoint", step=step, path=path, seconds=seconds, held=seconds)
