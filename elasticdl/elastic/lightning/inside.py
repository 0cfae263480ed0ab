"""What of Lightning has no public name, and what is made of it: what cannot be had of a trainer, what a training step logs, where a trainer stands.

Run with Lightning 2.5.0 and 2.6.6.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from elasticdl.elastic.torch_kit.own_loader import OpenBatch
from elasticdl.elastic.torch_kit.participant import NO_EPOCH, TrainerPlace
from elasticdl.elastic.torch_kit.reducer import Rides
from elasticdl.elastic.torch_kit.tensors import ElasticContext, HostCopy, RandomStreams
from elasticdl.elastic.training.pieces import mapped

# Barriers, by which Lightning says how far it is.
RESTORED, READY, SAVED = "_CheckpointConnector.resume_end", "run-stage", "Trainer.save_checkpoint"
LOADER_ASKED, TRAIN_LOADER_ASKED = "_dataloader()", "train_dataloader()"
# Attributes of a ModelCheckpoint that are in no state of its own: by these it knows whether it has saved a step already.
OF_SAVED = ("_last_global_step", "_last_checkpoint", "_defer_save")
PLAIN = (bool, int, float, str)


def cant_be_had(trainer: Any) -> Iterator[str]:
    """Of what it was told."""
    connector = trainer._accelerator_connector
    devices, nodes = len(connector._parallel_devices), connector._num_nodes_flag
    if nodes > 1:
        yield f"num_nodes={nodes}; leave it out, as the job gives each worker its machine"
    if devices > 1 and not trainer.strategy.shares_model and devices != trainer.accelerator.auto_device_count():
        yield f"devices={devices}; expected one, as the job starts a worker for each device"
    if connector._layer_sync is not None:
        yield "sync_batchnorm=True needs a process group: leave it out"
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval is a time, which each worker would measure for itself: give batches or a part of an epoch"


def begin_with(trainer: Any, number: int) -> None:
    """The present epoch is begun with its batch of this number, by which the loops know which one is the last."""
    trainer.fit_loop._data_fetcher.fetched = number


# A training step, and the hooks of its batch.


def accumulates(trainer: Any) -> bool:
    """Whether the batch in hand is not the last one of its step."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


def arguments_of_step(trainer: Any, batch: Any, index: int) -> tuple[Any, ...]:
    """Of ``training_step``."""
    return tuple(trainer.fit_loop.epoch_loop._build_kwargs({}, batch, index).values())


@contextlib.contextmanager
def moved(trainer: Any, batch: Any) -> Iterator[Any]:
    """``batch``, on the device of training, by the hooks of batches. Within, what is logged is of this batch."""
    results = trainer.fit_loop.epoch_loop._results
    before = results.batch, results.batch_size
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    results.batch, results.batch_size = trainer.strategy.batch_to_device(batch, dataloader_idx=0), None
    try:
        yield results.batch
    finally:
        results.batch, results.batch_size = before


def is_in_training_step(module: Any) -> bool:
    return bool(module._current_fx_name == "training_step")


@contextlib.contextmanager
def in_training_step(module: Any) -> Iterator[None]:
    """Within, ``self.log`` is called by ``training_step``, as far as Lightning can tell."""
    before, module._current_fx_name = module._current_fx_name, "training_step"
    try:
        yield
    finally:
        module._current_fx_name = before


# What a script logs in its training step: of this worker's part of a batch, made that of the global batch.
#
# ``self.log`` ends in ``update_metrics`` of the training loop's results. If there are several workers, what a training step logs is only noted
# there. It is summed over the workers with the gradients, and logged once the step is certain. So the results are the same on all
# workers between two steps, and a step that is torn leaves no trace in them.

Accumulators = tuple[Any, Any]  # of a key over an epoch: of values, and of the samples that they stand for
SUMMED = ("mean", "sum")
OBJECTS = "a torchmetrics object that is logged in training_step counts this worker's parts of the batches only: log values there"


@dataclass(frozen=True, slots=True)
class Part:
    """What the training step runs on: of ``loaded`` samples so many count, and they are so much of the global batch."""

    weight: float
    loaded: int
    samples: int


@dataclass(slots=True)
class Value:
    """What was logged of the parts of a batch that this worker has."""

    key: str
    is_mean: bool
    # With the size that Lightning has of the batch.
    parts: list[tuple[HostCopy, float, Part]] = field(default_factory=list)

    def numbers(self) -> tuple[float, float]:
        """Summed over the workers, those of the global batch."""
        counted = [(float(copy.wait()), size, part) for copy, size, part in self.parts if part.samples]
        value = sum(each * (part.weight if self.is_mean else 1.0) for each, _, part in counted)
        # By its own number of samples, or by one that the script has given for the whole batch.
        return value, sum(part.samples if size == part.loaded else size * part.weight for _, size, part in counted)


@dataclass(slots=True)
class GivenBatch(OpenBatch):
    index: int = 0  # as the training step is told
    asked: int = 0  # of the workers' answers, before the training step
    logged: dict[str, Value] = field(default_factory=dict)  # by the names under which they ride
    left_out: int = 0  # samples of this worker's part for which the training step has returned None


class Logged:
    """The results of the training loop, by key."""

    def __init__(self, job: ElasticContext, trainer: Any) -> None:
        self._job = job
        self._module = trainer.lightning_module
        self._results: Any = trainer.fit_loop.epoch_loop._results
        self._log = self._results.update_metrics
        self._results.update_metrics = self._note
        # The job's, of keys that this worker's script has not logged yet.
        self._pending: dict[str, Accumulators] = {}
        self._running: tuple[GivenBatch, Part] | None = None  # while a training step does
        self._times: dict[str, int] = {}  # that it has logged a key before
        self._found: list[tuple[str, float, float]] = []  # of the step: key, value and size, over all workers
        self._warnings: set[str] = set()  # that were given

    def end(self) -> None:
        vars(self._results).pop("update_metrics", None)

    # -- in the training step --

    @contextlib.contextmanager
    def collecting(self, given: GivenBatch, part: Part) -> Iterator[None]:
        """Within, the training step runs on this part of a batch."""
        self._running, self._times = (given, part), {}
        try:
            yield
        finally:
            self._running = None

    def _note(self, key: str, value: Any, size: int) -> None:
        metric = self._results[key]
        if key in self._pending:
            _put_accumulators(metric, self._pending.pop(key))
        if self._running is None or not self._is_summed(metric):
            self._log(key, value, size)
            return
        given, part = self._running
        times = self._times[key] = self._times.get(key, 0) + 1
        is_mean = metric.meta.reduce_fx.__name__ == "mean"
        noted = given.logged.setdefault(f"{key} ({given.index}.{times})", Value(key, is_mean))
        noted.parts.append((HostCopy(value.detach()), size, part))

    def _is_summed(self, metric: Any) -> bool:
        """What is not, is this worker's own, and is named once."""
        if not metric.is_tensor:
            self._warn(OBJECTS)
        elif metric.meta.sync.rank_zero_only:
            return False
        elif metric.meta.reduce_fx.__name__ in SUMMED:
            return True
        else:
            self._warn(
                f"the largest or smallest {metric.meta.name!r} is that of each worker's part of a batch: log a mean, or a sum"
            )
        return False

    # -- with the gradients --

    def rides(self, open_batches: Sequence[GivenBatch]) -> dict[str, tuple[float, float]]:
        """To be summed over the workers, which have logged the same keys."""
        return {name: value.numbers() for given in open_batches for name, value in given.logged.items()}

    def heard(self, rides: Rides, open_batches: Sequence[GivenBatch]) -> None:
        every = (each for given in open_batches for each in given.logged.items())
        self._found = [(value.key, *rides[name].tolist()) for name, value in every]

    def apply(self) -> None:
        """The step is made: what was found is what the script has logged."""
        found, self._found = self._found, []
        if not found:
            return
        with in_training_step(self._module):
            for key, value, size in found:
                like = self._results[key].value
                samples = round(size) if abs(size - round(size)) < 1e-6 else size
                self._log(key, torch.tensor(value, dtype=like.dtype, device=like.device), samples)

    # -- as a part of the training state --

    def dump(self) -> dict[str, Accumulators]:
        """Accumulators of the epoch. By reference, as Lightning makes new tensors of them."""
        held = {
            key: (metric.value, getattr(metric, "cumulated_batch_size", None))
            for key, metric in self._results.items()
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
        }
        return {**self._pending, **held}

    def load(self, accumulators: dict[str, Accumulators]) -> None:
        for metric in self._results.values():
            if metric.is_tensor:
                metric.reset()
        self._pending = dict(accumulators)
        for key in self._results.keys() & self._pending.keys():
            _put_accumulators(self._results[key], self._pending.pop(key))

    # -- details --

    def _warn(self, message: str) -> None:
        if message not in self._warnings:
            self._warnings.add(message)
            self._job.warn(message)


def _put_accumulators(metric: Any, accumulators: Accumulators) -> None:
    metric.value, size = accumulators
    if size is not None:
        metric.cumulated_batch_size = size
    metric._computed, metric.has_reset = None, False


# Where a trainer stands, beside weights and optimizer: its loops, callbacks and metrics. It travels to workers that come later, which begin the
# present epoch as any, and find all as it is at the job's next batch.

# In the state of Lightning's callbacks: what goes by this worker's clock, and what its ``load_state_dict`` does not take.
OF_EACH_WORKER = ("time_elapsed", "current_score")


class TrainerState(TrainerPlace):
    """See `elasticdl.elastic.torch_kit.participant.TrainerPlace`."""

    def __init__(self, job: ElasticContext, trainer: Any, logged: Logged) -> None:
        super().__init__()
        self._job = job
        self._trainer = trainer
        self._logged = logged
        self._is_at_batch = False  # otherwise before the loops, or behind them
        self.is_reading = False  # what Lightning would save beside weights and optimizers, which travel by themselves
        # Nothing in it changes any more; None: it is read when it is asked for.
        self._noted: dict[str, Any] | None = None

    def begin(self) -> None:
        """All of the trainer is there."""
        trainer = self._trainer
        loops = loops_of(trainer.fit_loop)
        self._plain = [(vars(each), names_of_plain(each)) for each in (*loops, *counts_of(loops))]
        self._plain += [(vars(each), names_of_plain(each, OF_SAVED)) for each in trainer.checkpoint_callbacks]

    def note(self, epoch: int, batch: int) -> None:
        super().note(epoch, batch)
        self._is_at_batch = epoch != NO_EPOCH
        # A step of one worker is not torn: its state is sent between two steps alone.
        self._noted = self._take() if self._job.size > 1 else None

    def _take(self) -> dict[str, Any]:
        trainer, connector = self._trainer, self._trainer._logger_connector
        return {
            "at_batch": self._is_at_batch,
            "counts": [{name: values[name] for name in names} for values, names in self._plain],
            "logged": self._logged.dump(),
            "metrics": [dict(each) for each in _metrics_of(trainer)],
            "logging_place": (connector._current_fx, connector._first_loop_iter),
            "should_stop": trainer.should_stop,
            "callbacks": {
                callback.state_key: mapped(lambda leaf: leaf, state)
                for callback in trainer.callbacks
                if (state := callback.state_dict())
            },
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
        self.is_reading = True
        try:
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:  # a callback may raise, and the next checkpoint is Lightning's own
            self.is_reading = False
        for name in ("state_dict", "optimizer_states", "loops", "lr_schedulers"):
            checkpoint.pop(name, None)
        loggers = [(getattr(each, "_name", None), each.version) for each in self._trainer.loggers]
        return {**checkpoint, "callbacks": {**checkpoint["callbacks"], **callbacks}, "elasticdl": loggers}

    # -- putting in place --

    def enter(self, weights: Any) -> bool:
        """Before the loops, with another's state, whose module has these ``weights``: they are to begin in the job's epoch. Returns whether the job is within it."""
        trainer, there = self._trainer, self.received
        assert there is not None, "another's state has come"
        self._write_where_they_write(there["checkpoint"])
        if there["at_batch"] or any(each.get("ready") for each in there["counts"]):
            self._load_checkpoint({"state_dict": weights, **there["checkpoint"]})
        self._put_counts(there)
        trainer.should_stop = there["should_stop"]
        RandomStreams.restore(there["outside"])
        return bool(there["at_batch"])

    def apply(self, numbers: dict[str, Any]) -> None:
        """In the loader, where the job stands: all is as it is there, whatever the loops have made of it."""
        if not numbers["at_batch"]:
            return
        trainer = self._trainer
        self._put_counts(numbers)
        for own, theirs in zip(_metrics_of(trainer), numbers["metrics"], strict=True):
            own.clear()
            own.update(theirs)
        connector = trainer._logger_connector  # in which hook it is, and whether in the first iteration
        connector._current_fx, connector._first_loop_iter = numbers["logging_place"]
        self._logged.load(numbers["logged"])
        trainer.should_stop = numbers["should_stop"]
        for callback in trainer.callbacks:
            if callback.state_key in numbers["callbacks"]:
                callback.load_state_dict(mapped(lambda leaf: leaf, numbers["callbacks"][callback.state_key]))

    def _put_counts(self, there: dict[str, Any]) -> None:
        for (own, _), theirs in zip(self._plain, there["counts"], strict=True):
            own.update(theirs)

    def _load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """But for weights, optimizers and loops."""
        connector, module = self._trainer._checkpoint_connector, self._trainer.lightning_module
        connector._loaded_checkpoint = checkpoint
        try:
            module.on_load_checkpoint(checkpoint)
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
        finally:
            connector._loaded_checkpoint = {}

    def _write_where_they_write(self, checkpoint: dict[str, Any]) -> None:
        for logger, (name, version) in zip(self._trainer.loggers, checkpoint["elasticdl"], strict=False):
            for attribute, value in (("_name", name), ("_version", version)):
                if hasattr(logger, attribute):
                    setattr(logger, attribute, value)
        for callback in self._trainer.checkpoint_callbacks:
            folder = (checkpoint["callbacks"].get(callback.state_key) or {}).get("dirpath")
            if folder is not None:
                callback.dirpath = folder


def names_of_plain(holder: Any, prefixes: tuple[str, ...] = ("",)) -> list[str]:
    return [name for name, value in vars(holder).items() if type(value) in PLAIN and name.startswith(prefixes)]


def _metrics_of(trainer: Any) -> tuple[dict[str, Any], ...]:
    connector = trainer._logger_connector
    return connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics


def loops_of(loop: Any) -> list[Any]:
    """This loop and those within it."""
    inner = [each for each in vars(loop).values() if hasattr(each, "restarting") and hasattr(each, "on_iteration_done")]
    return [loop, *(each for one in inner for each in loops_of(one))]


def counts_of(loops: list[Any]) -> list[Any]:
    """The objects within the loops that hold nothing but counts, and those that hold these."""
    found = [value for loop in loops for value in vars(loop).values() if hasattr(value, "reset_on_run")]
    for each in found:  # which grows meanwhile
        found += [value for value in vars(each).values() if hasattr(value, "__dict__")]
    return [each for each in found if any(type(value) in PLAIN for value in vars(each).values())]


def log_hyperparameters(trainer: Any) -> None:
    """And the graph, by all loggers."""
    importlib.import_module(f"{trainer.strategy.package}.loggers.utilities")._log_hyperparams(trainer)
