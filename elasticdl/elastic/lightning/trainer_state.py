"""Where a trainer stands, beside weights and optimizer: its loops, callbacks, metrics and random streams.

It travels to workers that come later, which go on from there as from a checkpoint.

And who writes files, and what is told of that.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.lightning.logged import Held, Logged
from elasticdl.elastic.torch_kit.own_loader import Streams, restore_streams, stream_parts, streams
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.training.nested import mapped
from elasticdl.elastic.training.pieces import Piece

PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "elasticdl")
PLAIN = (bool, int, float, str)
# In the state of Lightning's callbacks: what goes by this worker's clock, and what its ``load_state_dict`` does not take.
OF_EACH_WORKER = ("time_elapsed", "current_score")
# Attributes of a ModelCheckpoint that are in no state of its own: by these it knows whether it has saved a step already.
OF_SAVED = ("_last_global_step", "_last_checkpoint", "_defer_save")


@dataclass(slots=True)
class Snapshot:
    """Of one moment; nothing in it changes any more."""

    at_batch: bool  # the loader is asked for a batch; otherwise before the loops, or behind them
    epoch: int
    number: int  # of that batch, in its epoch
    loops: list[dict[str, Any]]  # what they and their counts hold, but for objects
    logged: dict[str, Held]
    metrics: tuple[dict[str, Any], ...]
    cursor: tuple[Any, Any]  # of the logger connector: in which hook, whether in the first iteration
    should_stop: bool
    streams: Streams
    callbacks: dict[str, Any]
    saved: list[dict[str, Any]]  # by those that write checkpoints: what was last
    checkpoint: dict[str, Any] = field(default_factory=dict)  # what else Lightning would save; made when it is sent


class TrainerState(Piece):
    """The trainer's part of the training state."""

    name = "trainer"
    is_value = True

    def __init__(self, trainer: Any, logged: Logged) -> None:
        self._trainer = trainer
        self._logged = logged
        self._loops = list(_loops_of(trainer.fit_loop))
        self._plain = plain_holders(self._loops)
        self._saved = [
            (values, [name for name in names if name.startswith(OF_SAVED)])
            for values, names in plain_holders(trainer.checkpoint_callbacks)
        ]
        self._schedulers = self._present_schedulers()
        self._noted: tuple[bool, int, int] | None = None  # where it stands, if no snapshot was taken there
        self.snapshot = self.take(at_batch=False)

    # -- for the training state --

    def compared(self) -> dict[str, Any]:
        """Of the moment before the batch in hand."""
        snapshot = self.snapshot
        return {
            "trainer": {"should_stop": snapshot.should_stop},
            "callbacks": {
                key.partition("{")[0]: {name: each for name, each in state.items() if name not in OF_EACH_WORKER}
                for key, state in snapshot.callbacks.items()
            },
            **stream_parts(*snapshot.streams),
        }

    def keep(self) -> None:
        self._kept = self.snapshot

    def undo(self) -> None:
        self.load(self._kept)

    def dump(self) -> Snapshot:
        self._complete()
        return self.snapshot

    def load(self, dumped: Snapshot) -> None:
        self.snapshot, self._noted = dumped, None

    # -- taking --

    def note(self, *, at_batch: bool, epoch: int = 0, number: int = 0, moves: bool = True) -> None:
        """The trainer stands here from now on. ``moves``: its state may be asked for when it has gone on.

        Raises:
            UserError: a callback has exchanged what a newcomer is sent the state of.
        """
        if at_batch and self._present_schedulers() != self._schedulers:
            raise UserError(
                "a callback has exchanged a scheduler while the trainer trains, and a worker that comes later would keep the first "
                "one: make all schedulers in configure_optimizers"
            )
        self._noted = None if moves else (at_batch, epoch, number)
        if moves:
            self.snapshot = self.take(at_batch=at_batch, epoch=epoch, number=number)

    def _present_schedulers(self) -> list[int]:
        return [id(config.scheduler) for config in self._trainer.lr_scheduler_configs]

    def take(self, *, at_batch: bool, epoch: int = 0, number: int = 0) -> Snapshot:
        trainer = self._trainer
        connector = trainer._logger_connector
        return Snapshot(
            at_batch,
            epoch,
            number,
            [{name: values[name] for name in names} for values, names in self._plain],
            self._logged.dump(),
            tuple(dict(each) for each in _metrics_of(connector)),
            (connector._current_fx, connector._first_loop_iter),
            trainer.should_stop,
            streams(),
            {
                callback.state_key: mapped(lambda leaf: leaf, state)
                for callback in trainer.callbacks
                if (state := callback.state_dict())
            },
            [{name: values[name] for name in names} for values, names in self._saved],
        )

    def _complete(self) -> None:
        """Add to the snapshot what is asked of the script's own hooks only when it is sent."""
        if self._noted is not None:
            at_batch, epoch, number = self._noted
            self.note(at_batch=at_batch, epoch=epoch, number=number)
        if self.snapshot.checkpoint:
            return
        trainer = self._trainer
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        own = trainer.strategy.lightning_module_state_dict()
        dumped = checkpoint["state_dict"]
        if dumped.keys() == own.keys() and all(dumped[key] is own[key] or _same(dumped[key], own[key]) for key in own):
            del checkpoint["state_dict"]
        for name in ("optimizer_states", "loops", "lr_schedulers"):
            checkpoint.pop(name, None)
        checkpoint["callbacks"] = {**checkpoint["callbacks"], **self.snapshot.callbacks}
        versions = [(getattr(each, "_name", None), each.version) for each in trainer.loggers]
        self.snapshot.checkpoint = {**checkpoint, "elasticdl": versions}

    # -- putting in place --

    def enter(self) -> None:
        """Before the loops: they are to begin where the job stands."""
        trainer, snapshot = self._trainer, self.snapshot
        self._write_where_they_write()
        if snapshot.at_batch or any(each.get("ready") for each in snapshot.loops):
            self._load_checkpoint()
        self._put_loops()
        trainer.should_stop = snapshot.should_stop
        restore_streams(snapshot.streams)
        if snapshot.at_batch:
            for loop in self._loops:
                loop._loaded_from_state_dict = loop._resuming_from_checkpoint = True
            trainer.fit_loop.restarting = True

    def arrive(self) -> None:
        """In the loader, where the job stands: all is as it is there, whatever the loops have made of it."""
        trainer, snapshot = self._trainer, self.snapshot
        if not snapshot.at_batch:
            return
        connector = trainer._logger_connector
        for own in _metrics_of(connector):
            own.clear()
        self._put_loops()
        connector._current_fx, connector._first_loop_iter = snapshot.cursor
        self._logged.load(snapshot.logged)
        trainer.should_stop = snapshot.should_stop
        for callback in trainer.callbacks:
            if callback.state_key in snapshot.callbacks:
                callback.load_state_dict(mapped(lambda leaf: leaf, snapshot.callbacks[callback.state_key]))
        for (values, _), theirs in zip(self._saved, snapshot.saved, strict=True):
            values.update(theirs)
        restore_streams(snapshot.streams)

    def _put_loops(self) -> None:
        for (own, _), theirs in zip(self._plain, self.snapshot.loops, strict=True):
            own.update(theirs)
        if self.snapshot.at_batch:
            for own, theirs in zip(_metrics_of(self._trainer._logger_connector), self.snapshot.metrics, strict=True):
                own.update(theirs)

    def _write_where_they_write(self) -> None:
        trainer, states = self._trainer, self.snapshot.checkpoint.get("callbacks", self.snapshot.callbacks)
        for logger, (name, version) in zip(
            trainer.loggers, self.snapshot.checkpoint.get("elasticdl", ()), strict=False
        ):
            for attribute, value in (("_name", name), ("_version", version)):
                if hasattr(logger, attribute):
                    setattr(logger, attribute, value)
        for callback in trainer.checkpoint_callbacks:
            folder = (states.get(callback.state_key) or {}).get("dirpath")
            if folder is not None:
                callback.dirpath = folder

    def _load_checkpoint(self) -> None:
        connector = self._trainer._checkpoint_connector
        module = self._trainer.lightning_module
        checkpoint = {"state_dict": module.state_dict(), **self.snapshot.checkpoint}
        connector._loaded_checkpoint = checkpoint
        try:
            module.on_load_checkpoint(checkpoint)
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
        finally:
            connector._loaded_checkpoint = {}


def plain_holders(loops: Sequence[Any]) -> list[tuple[dict[str, Any], list[str]]]:
    """Of loops and their counts, the attributes, and the names of those that are plain values."""
    return [
        (vars(each), [name for name, value in vars(each).items() if type(value) in PLAIN])
        for each in (*loops, *_counts_of(loops))
    ]


def _metrics_of(connector: Any) -> tuple[dict[str, Any], ...]:
    return connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics


def _loops_of(loop: Any) -> Iterator[Any]:
    yield loop
    for value in list(vars(loop).values()):
        if hasattr(value, "restarting") and hasattr(value, "on_iteration_done"):
            yield from _loops_of(value)


def _counts_of(loops: Sequence[Any]) -> Iterator[Any]:
    """The objects within the loops that hold nothing but counts, and those that hold these."""
    pending = [value for loop in loops for value in vars(loop).values() if hasattr(value, "reset_on_run")]
    while pending:
        each = pending.pop(0)
        if any(type(value) in PLAIN for value in vars(each).values()):
            yield each
        pending += [value for value in vars(each).values() if hasattr(value, "__dict__")]


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.data_ptr() == other.data_ptr()


class Window:
    """Random streams: those of a batch and a rank where a worker does something with its part of the batch, and the script's elsewhere.

    Open while a batch is loaded and moved to its device, and while the training step runs; paused for hooks in between.
    """

    def __init__(self) -> None:
        self._outside: Streams | None = None  # the script's, while the window is open
        self._within: Streams | None = None  # while it is paused

    def open(self, seed: Callable[[], None] | None) -> None:
        """``seed``: sets the streams of the batch; None: the script's are used throughout."""
        self._within = None
        if seed is not None:
            self._outside = streams()
            seed()

    def pause(self) -> None:
        if self._outside is not None:
            self._within = streams()
            restore_streams(self._outside)
            self._outside = None

    def resume(self) -> None:
        if self._within is not None:
            self._outside = streams()
            restore_streams(self._within)
            self._within = None

    def close(self) -> None:
        self._within = None
        if self._outside is not None:
            restore_streams(self._outside)
            self._outside = None


def begin_epoch_as_others(trainer: Any) -> None:
    """What the hooks change of the job's state is replaced by that; what else they set, as of a data set, stays.

    Lightning calls them where an epoch begins, and not where one is resumed.
    """
    (package,) = {each.__module__.partition(".trainer.")[0] for each in type(trainer).__mro__ if _is_trainer(each)}
    call: Any = importlib.import_module(f"{package}.trainer.call")
    call._call_callback_hooks(trainer, "on_train_epoch_start")
    call._call_lightning_module_hook(trainer, "on_train_epoch_start")


def _is_trainer(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in PACKAGES and kind.__name__ == "Trainer"


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
