"""Where a trainer stands, beside weights and optimizer: its loops, callbacks and metrics.

It travels to workers that come later, which go on from there as from a checkpoint.

And who writes files, and what is told of that.
"""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

from elasticdl.elastic.lightning import private
from elasticdl.elastic.lightning.logged import Logged
from elasticdl.elastic.torch_kit.movable_host import NO_EPOCH, TrainerPlace
from elasticdl.elastic.torch_kit.tensors import ElasticContext, RandomStreams
from elasticdl.elastic.training.pieces import mapped

# In the state of Lightning's callbacks: what goes by this worker's clock, and what its ``load_state_dict`` does not take.
OF_EACH_WORKER = ("time_elapsed", "current_score")


class TrainerState(TrainerPlace):
    """See `elasticdl.elastic.torch_kit.movable_host.TrainerPlace`."""

    def __init__(self, job: ElasticContext, trainer: Any, logged: Logged) -> None:
        super().__init__()
        self._job = job
        self._trainer = trainer
        self._logged = logged
        self._is_at_batch = False  # otherwise before the loops, or behind them
        # Nothing in it changes any more; None: it is read when it is asked for.
        self._noted: dict[str, Any] | None = None

    def begin(self) -> None:
        """All of the trainer is there."""
        trainer = self._trainer
        self._loops = private.loops_of(trainer.fit_loop)
        held = [*self._loops, *private.counts_of(self._loops)]
        self._plain = [(vars(each), [*names_of_plain(each)]) for each in held]
        self._saved = [
            (vars(each), [name for name in names_of_plain(each) if name.startswith(private.OF_SAVED)])
            for each in trainer.checkpoint_callbacks
        ]

    def note(self, epoch: int, batch: int) -> None:
        super().note(epoch, batch)
        self._is_at_batch = epoch != NO_EPOCH
        # A step of one worker is not torn: its state is sent between two steps alone.
        self._noted = self._take() if self._job.size > 1 else None

    def _take(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "at_batch": self._is_at_batch,
            "loops": [{name: values[name] for name in names} for values, names in self._plain],
            "logged": self._logged.dump(),
            "metrics": [dict(each) for each in private.metrics_of(trainer)],
            "logging_place": private.logging_place(trainer),
            "should_stop": trainer.should_stop,
            "callbacks": {
                callback.state_key: mapped(lambda leaf: leaf, state)
                for callback in trainer.callbacks
                if (state := callback.state_dict())
            },
            "saved": [{name: values[name] for name in names} for values, names in self._saved],
        }

    def compared(self) -> dict[str, Any]:
        """Of the moment before the batch in hand."""
        if self.received is not None:
            return {}
        noted = self._noted or self._take()
        return {
            "trainer": {"should_stop": noted["should_stop"]},
            "callbacks": {
                key.partition("{")[0]: {name: each for name, each in state.items() if name not in OF_EACH_WORKER}
                for key, state in noted["callbacks"].items()
            },
            **RandomStreams.compared(self.outside or RandomStreams.capture()),
        }

    def read(self) -> dict[str, Any]:
        noted = self._noted or self._take()
        if "checkpoint" not in noted:  # the script's own hooks are asked for it
            noted["checkpoint"] = self._checkpoint(noted["callbacks"])
        return noted

    def _checkpoint(self, callbacks: dict[str, Any]) -> dict[str, Any]:
        """What else Lightning would save."""
        checkpoint = private.dump_checkpoint(self._trainer)
        for name in ("state_dict", "optimizer_states", "loops", "lr_schedulers"):
            checkpoint.pop(name, None)
        loggers = [private.name_and_version(each) for each in self._trainer.loggers]
        return {**checkpoint, "callbacks": {**checkpoint["callbacks"], **callbacks}, "elasticdl": loggers}

    # -- putting in place --

    def enter(self, weights: Any) -> bool:
        """Before the loops, with another's state, whose module has these ``weights``: they are to begin where the job stands. Returns whether that is within an epoch."""
        trainer, there = self._trainer, self.received
        assert there is not None, "another's state has come"
        self._write_where_they_write(there["checkpoint"])
        if there["at_batch"] or any(each.get("ready") for each in there["loops"]):
            private.load_checkpoint(trainer, {"state_dict": weights, **there["checkpoint"]})
        self._put_loops(there)
        trainer.should_stop = there["should_stop"]
        RandomStreams.restore(there["outside"])
        if there["at_batch"]:
            private.resume_within_epoch(trainer, self._loops)
        return bool(there["at_batch"])

    def apply(self, numbers: dict[str, Any]) -> None:
        """In the loader, where the job stands: all is as it is there, whatever the loops have made of it."""
        if not numbers["at_batch"]:
            return
        trainer = self._trainer
        self._put_loops(numbers)
        for own, theirs in zip(private.metrics_of(trainer), numbers["metrics"], strict=True):
            own.clear()
            own.update(theirs)
        private.set_logging_place(trainer, numbers["logging_place"])
        self._logged.load(numbers["logged"])
        trainer.should_stop = numbers["should_stop"]
        for callback in trainer.callbacks:
            if callback.state_key in numbers["callbacks"]:
                callback.load_state_dict(mapped(lambda leaf: leaf, numbers["callbacks"][callback.state_key]))
        for (values, _), theirs in zip(self._saved, numbers["saved"], strict=True):
            values.update(theirs)

    def _put_loops(self, there: dict[str, Any]) -> None:
        for (own, _), theirs in zip(self._plain, there["loops"], strict=True):
            own.update(theirs)

    def _write_where_they_write(self, checkpoint: dict[str, Any]) -> None:
        for logger, (name, version) in zip(self._trainer.loggers, checkpoint["elasticdl"], strict=False):
            private.set_name_and_version(logger, name, version)
        for callback in self._trainer.checkpoint_callbacks:
            folder = (checkpoint["callbacks"].get(callback.state_key) or {}).get("dirpath")
            if folder is not None:
                callback.dirpath = folder


def names_of_plain(holder: Any) -> list[str]:
    return [name for name, value in vars(holder).items() if type(value) in private.PLAIN]


# What rank 0 alone does, whichever worker that is: it writes files, shows the progress bar, and tells the job of validations and checkpoints.

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
        private.log_hyperparameters(trainer)

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
