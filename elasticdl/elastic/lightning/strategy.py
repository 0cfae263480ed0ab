"""The strategy that trains with workers that come and go, made for either of Lightning's packages.

And the loader that ``fit`` is given in its place.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from elasticdl.common.credentials import MASTER, PROCESS
from elasticdl.common.errors import UserError
from elasticdl.common.reason import tell_uncaught_in_one_line
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.lightning import inside
from elasticdl.elastic.lightning.fit_host import (
    NOBODY,
    WHO,
    FitHost,
    Writing,
    of_callbacks,
    require_module,
)
from elasticdl.elastic.torch_kit.own_loader import OwnLoader
from elasticdl.elastic.torch_kit.refusals import of_loader, refuse
from elasticdl.elastic.torch_kit.tensors import ElasticContext, choose_device
from elasticdl.elastic.training.runtime import ScriptRuntime

OF_SEVERAL = (
    f"{WHO}: this worker has several processes (--processes_per_worker), which share one model: take ElasticModelParallelStrategy of "
    "elasticdl.elastic.lightning, or leave the option out"
)
OF_ONE_PROCESS = (
    "ElasticModelParallelStrategy: the processes among which a model is shared are those of a worker: give `elasticdl run` "
    '--processes_per_worker, or take Trainer(strategy="elastic")'
)
BY_HAND = (
    "ElasticModelParallelStrategy: manual optimization is for workers of one process: take automatic optimization, or a plain loop with "
    "elastic.prepare"
)

# The train loader: of each of its batches, which are the global ones, this worker loads its part.


def start_safely(loader: Any) -> None:
    """A fork would take the session's threads and locks along into the processes that load data."""
    if isinstance(loader, DataLoader) and loader.num_workers and loader.multiprocessing_context is None:
        loader.multiprocessing_context = "forkserver"


class TrainLoader:
    """The script's own loader, as far as Lightning can tell."""

    def __init__(self, loader: DataLoader[Any], host: FitHost) -> None:
        self.batches = OwnLoader(loader, WHO)
        self._loader = loader
        self._host = host

    def __len__(self) -> int:
        """Batches of an epoch, whatever the number of workers."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # Lightning would keep the state of a loader that has one; this worker's is not the job's.
        if name.startswith("__") or name in ("state_dict", "load_state_dict") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        self.batches.draws.draw_seed()  # for each iterator, used or not, as torch does
        return self._host.epoch(self.batches)


def _make(package: str, runtime: ScriptRuntime[ElasticContext], kind: str) -> type[Any]:
    """What every elastic strategy does, over Lightning's own strategy of this ``kind``."""
    base: Any = getattr(importlib.import_module(f"{package}.strategies"), kind)
    rank_zero_only = importlib.import_module(f"{package}.utilities.rank_zero").rank_zero_only

    class Elastic(base):  # type: ignore[misc]
        package: str
        takes_part_alone = False  # in a job of its own, for tests
        shares_model = False  # among the processes of a worker

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if MASTER in os.environ and (PROCESS in os.environ) != self.shares_model:
                raise UserError(OF_ONE_PROCESS if self.shares_model else OF_SEVERAL)
            self._host: FitHost | None = None  # while there may be other workers
            self._writing: Writing | None = None
            self._asked = ""  # which loaders were asked for last
            self._train_loaders = 0  # of these
            tell_uncaught_in_one_line()
            if MASTER in os.environ:
                rank_zero_only.rank = NOBODY

        # -- which rank --

        @property
        def global_rank(self) -> int:
            if self._writing is not None:
                return self._writing.rank
            if MASTER in os.environ:
                return NOBODY
            rank: int = getattr(super(), "global_rank", 0)
            return rank

        @global_rank.setter
        def global_rank(self, value: int) -> None:
            """The job decides."""

        @property
        def is_global_zero(self) -> bool:
            return self.global_rank == 0

        # -- the beginning and the end --

        def setup_environment(self) -> None:
            trainer = self.lightning_module.trainer
            refuse(WHO, inside.cant_be_had(trainer))
            super().setup_environment()
            if trainer.state.fn == "fit" and (self.takes_part_alone or MASTER in os.environ):
                self._begin(trainer)

        def _begin(self, trainer: Any) -> None:
            if self._host is not None:
                raise UserError(f"{WHO}: trainer.fit was called before: under `elasticdl run` a script trains once")
            refuse(WHO, of_callbacks(trainer))
            job = runtime.init_in_place(global_batch_size=1)
            # Processes that load data are forked from one that has imported what takes long.
            multiprocessing.set_forkserver_preload([package, __package__])
            self._writing = Writing(trainer, rank_zero_only)
            self._host = FitHost(trainer, runtime, job, self._writing)

        def setup(self, trainer: Any) -> None:
            if self.shares_model and self._host is not None and not self.lightning_module.automatic_optimization:
                raise UserError(BY_HAND)
            super().setup(trainer)
            if trainer.state.fn == "fit":
                require_module(self.lightning_module, self.optimizers)

        def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
            super().barrier(name, *args, **kwargs)
            if name is not None and name.endswith(inside.LOADER_ASKED):
                self._asked, self._train_loaders = name, 0
            host = self._host
            if host is None:
                return
            if name == inside.RESTORED and self.lightning_module.trainer.state.fn == "fit":
                host.begin()
            elif name == inside.READY:
                host.keep_sigterm()
            elif name == inside.SAVED:
                host.of_first(None)  # which waits for all

        def on_train_end(self) -> None:
            super().on_train_end()
            if self._host is not None:
                self._host.ended()

        def teardown(self) -> None:
            if self._host is None:
                super().teardown()
                return
            # Model and optimizer stay where they are: the workers' last word to each other is on the same device.
            for part in (self.precision_plugin, self.accelerator, self.checkpoint_io):
                part.teardown()

        # -- a batch --

        def process_dataloader(self, dataloader: Any) -> Any:
            if self._asked != inside.TRAIN_LOADER_ASKED:
                if self._host is not None:
                    start_safely(dataloader)
                return dataloader
            self._train_loaders += 1
            if self._train_loaders > 1:
                raise UserError(f"{WHO}: there are several train loaders; expected one")
            refuse(WHO, of_loader(dataloader))
            if self._host is None:
                return dataloader
            loader = TrainLoader(dataloader, self._host)
            batches = self.lightning_module.trainer.accumulate_grad_batches
            self._host.job.policy = BatchPolicy(loader.batches.size * batches, None)  # for who asks
            return loader

        def batch_to_device(self, *args: Any, **kwargs: Any) -> Any:
            """Of each batch, whatever is done with it."""
            with self._host.moving() if self._host is not None else contextlib.nullcontext():
                return super().batch_to_device(*args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            step: Callable[[], Any] = functools.partial(super().training_step, *args, **kwargs)
            return step() if self._host is None else self._host.training_step(step)

        def on_validation_start(self) -> None:
            super().on_validation_start()
            if self._host is not None:
                self._host.told.validation_begins()

        def on_validation_end(self) -> None:
            super().on_validation_end()
            if self._host is not None:
                self._host.told.validation_ends()

        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            began = time.monotonic()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            if self._host is not None:
                self._host.told.saved(str(filepath), time.monotonic() - began)

        def step_again(self, batch: Any, index: int) -> Any:
            """The training step on another part of a batch."""
            module = self.lightning_module
            arguments = inside.arguments_of_step(module.trainer, batch, index)
            with inside.in_training_step(module):
                return super().training_step(*arguments)

        def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            host, precision, module = self._host, self.precision_plugin, self.lightning_module
            if host is None or not host.is_making:
                made: torch.Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
                return made
            self.pre_backward(closure_loss)
            scaled = precision.pre_backward(closure_loss, module)
            host.backward(
                closure_loss, scaled, lambda tensor: precision.backward(tensor, module, optimizer, *args, **kwargs)
            )
            made = precision.post_backward(scaled, module)
            self.post_backward(made)
            return made

        def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
            host = self._host
            if host is None or host.is_manual:
                return super().optimizer_step(optimizer, closure, model, **kwargs)
            result = closure()
            if host.is_to_update():
                super().optimizer_step(optimizer, lambda: result, model, **kwargs)
                host.participant.close()
            return result

        # -- what workers say to each other --

        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean", *args: Any, **kwargs: Any) -> Any:
            host = self._host
            if host is None:
                return super().reduce(tensor, group, reduce_op, *args, **kwargs)
            if str(reduce_op).lower() not in ("mean", "avg"):
                return tensor
            module = self.lightning_module
            if inside.is_in_training_step(module) or not module.trainer.training:
                return tensor
            tensor = super().reduce(tensor, group, reduce_op, *args, **kwargs)
            return host.mean(tensor) if isinstance(tensor, torch.Tensor) else tensor

        def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
            own: bool = super().reduce_boolean_decision(decision, all)
            return own if self._host is None else bool(self.broadcast(decision))

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            obj = super().broadcast(obj, src)
            return obj if self._host is None else self._host.of_first(obj)

    Elastic.package = package
    return Elastic


def _named(made: type[Any]) -> type[Any]:
    """With a class that is found by its name a trainer can be pickled."""
    made.__module__, made.__qualname__ = __package__, made.__name__
    return made


def make_strategy(package: str, runtime: ScriptRuntime[ElasticContext]) -> type[Any]:
    """The class for ``lightning.pytorch`` or ``pytorch_lightning``."""
    base: Any = _make(package, runtime, "SingleDeviceStrategy")

    class ElasticStrategy(base):  # type: ignore[misc]
        """A single device's, whose batches are divided among workers that come and go.

        The script believes that it is alone. Where it is, nothing is different from Lightning's own.
        """

        strategy_name = "elastic"

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._devices: list[torch.device] = []

        @property
        def parallel_devices(self) -> list[torch.device]:
            return self._devices

        @parallel_devices.setter
        def parallel_devices(self, devices: list[torch.device]) -> None:
            self._devices = devices
            self._root_device = devices[0]
            if devices[0].type == "cuda" and MASTER in os.environ:
                self._root_device = choose_device()

        @classmethod
        def register_strategies(cls, strategy_registry: Any) -> None:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__doc__, override=True)

    return _named(ElasticStrategy)


def make_shared_strategy(package: str, runtime: ScriptRuntime[ElasticContext]) -> type[Any]:
    """As `make_strategy`, for workers of several processes."""
    base: Any = _make(package, runtime, "ModelParallelStrategy")

    class ElasticModelParallelStrategy(base):  # type: ignore[misc]
        """Lightning's ModelParallelStrategy among the processes of one worker; batches are divided among workers that come and go.

        It takes the arguments of ModelParallelStrategy. The script believes that its worker is alone.
        """

        shares_model = True

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]:
            """The loader's batches are the global ones in each process, and are divided as they are loaded."""
            own: dict[str, Any] = super().distributed_sampler_kwargs
            return own if self._host is None else {**own, "num_replicas": 1, "rank": 0}

        def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            if self._host is not None and self._host.is_sending:
                return {}  # it goes along as it is, and torch would make a step with an optimizer that has no state yet
            state: dict[str, Any] = super().optimizer_state(optimizer)
            return state

        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            """By all processes of rank 0's worker."""
            if self._host is None or self._host.is_first:
                super().save_checkpoint(checkpoint, filepath, storage_options)
            else:
                self.broadcast(filepath)  # as those that write do

    return _named(ElasticModelParallelStrategy)
