"""Which worker writes files and the progress bar: rank 0 alone, whichever that is."""

from __future__ import annotations

import contextlib
import os
from typing import Any

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
                self._continue_files()
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

    def _continue_files(self) -> None:
        """A CSVLogger that begins would remove what the last rank 0 has written."""
        for logger in self._trainer.loggers:
            path = os.path.join(getattr(logger, "log_dir", None) or "", "metrics.csv")
            if not hasattr(logger, "_flush_logs_every_n_steps") or not os.path.isfile(path):
                continue
            kept = path + ".kept"
            os.replace(path, kept)
            with contextlib.suppress(FileNotFoundError):
                experiment = logger.experiment
                os.replace(kept, path)
                with open(path, newline="") as file:
                    experiment.metrics_keys = file.readline().strip().split(",")
