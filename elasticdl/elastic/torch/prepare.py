"""A plain training loop, made elastic in one line: what a script holds is made to speak to a `LoopHost`."""

from __future__ import annotations

import functools
import importlib
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from elasticdl.common.credentials import PROCESS
from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import ALONE
from elasticdl.elastic.torch.loop_host import LoopHost, PreparedLoader, Values, speak_to
from elasticdl.elastic.torch_kit.own_loader import OwnLoader
from elasticdl.elastic.torch_kit.refusals import Optimizers, require_plain, require_whole
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_evaluator import TorchEvaluator
from elasticdl.elastic.torch_kit.torch_state import PREPARED, TorchState
from elasticdl.elastic.training.evaluation import Metrics
from elasticdl.elastic.training.pieces import is_stateful
from elasticdl.elastic.training.runtime import ScriptRuntime

UNSAID = (
    "elastic.prepare: the optimizer has a state already, as of a checkpoint: give prepare(..., start_epoch=start), the number of epochs that it has "
    "seen, and 0 without one, as a worker that comes later may read another checkpoint"
)


class PlainLoop:
    """What a script with a plain training loop calls."""

    def __init__(self, runtime: ScriptRuntime[ElasticContext]) -> None:
        self._runtime = runtime
        self._host: LoopHost | None = None  # from `prepare` on

    def prepare(
        self,
        model: Any,
        optimizer: Any = None,
        loader: Any = None,
        *others: Any,
        start_epoch: int | None = None,
        **unknown: Any,
    ) -> tuple[Any, ...]:
        """Make a plain training loop elastic: ``model, optimizer, loader = elastic.prepare(model, optimizer, loader)``.

        The loop is otherwise unchanged. The loader's batches are the global batches, of each of which the script is given
        this worker's part. Further modules that the optimizers train are given along (docs/plain_loop.md).

        Args:
            model: the ``torch.nn.Module`` that is trained.
            optimizer: one of torch's, or an `elasticdl.ga.torch.optim.Optimizer` around one.
            loader: a ``torch.utils.data.DataLoader``, whose batch size is that of the global batch.
            *others: further optimizers, and objects with ``state_dict``, such as a GradScaler, whose state travels to workers that
                come later, and further modules.
            start_epoch: how many epochs the checkpoint has seen that the script has read before, 0 without one: with this epoch its loop begins.

        Returns:
            Model, optimizer, loader and the others, in order, to be used from now on.

        Raises:
            UserError: one of them is of a kind that can't be had, or `init` or `prepare` was called before.
        """
        if optimizer is None or loader is None or unknown:
            what = f"there is no argument {', '.join(unknown)}; " if unknown else ""
            raise UserError(
                f"elastic.prepare: {what}expected prepare(model, optimizer, loader): of the batches of that DataLoader each worker is given its part. If "
                "the script draws its batches otherwise, as from a replay buffer, make a data set with __len__ and __getitem__ of them"
            )
        if start_epoch is not None and (type(start_epoch) is not int or start_epoch < 0):
            raise UserError(
                f"elastic.prepare(start_epoch={start_epoch!r}): expected a number of epochs, 0 at the beginning"
            )
        given, steps = optimizer, 1
        known = sys.modules.get("elasticdl.ga.torch.optim")  # of what nobody has imported, nothing is imported
        if known is not None and isinstance(given, known.Optimizer):
            optimizer, steps = given.optimizer, given.steps
        if type(model) is torch.nn.DataParallel and len(model.device_ids) <= 1:  # it is on one device anyway
            model = model.module
        job = self._job_for(loader, steps)
        optimizers = [optimizer, *(each for each in others if isinstance(each, torch.optim.Optimizer))]
        if start_epoch is None and job.under_master and any(map(_has_stepped, optimizers)):
            raise UserError(UNSAID)
        if steps > 1 and len(optimizers) > 1:
            raise UserError(
                "elastic.prepare: one of several optimizers accumulates gradients; let one optimizer have all parameters"
            )
        for each in optimizers:
            require_plain(model, each)
        batches = OwnLoader(loader)
        for each in others:
            if not is_stateful(each):
                raise UserError(
                    f"elastic.prepare: a {type(each).__name__} has no state_dict and load_state_dict, by which it could travel to a "
                    "worker that comes later"
                )

        others_than_optimizers = [each for each in others if not isinstance(each, torch.optim.Optimizer)]
        values = {f"{PREPARED}{number}": each for number, each in enumerate(others_than_optimizers)}
        trained = Optimizers(optimizers) if len(optimizers) > 1 else optimizer
        self._host = host = LoopHost(
            job, model, trained, batches, values, self._runtime.leave, 1.0 / steps, start_epoch
        )
        self._runtime.train_in_place(host.finish, lambda: host.hint)
        for each in optimizers:
            speak_to(host, each)
        if given is not optimizer:
            # It imports PyTorch's compiler, which takes as long as PyTorch itself.
            accumulated = importlib.import_module("elasticdl.elastic.torch.accumulated_steps")
            optimizer = accumulated.AccumulatedSteps(given, host)
        return (model, optimizer, PreparedLoader(loader, host), *others)

    def _job_for(self, loader: Any, steps: int) -> ElasticContext:
        """``steps``: batches of the loader that make a global batch.

        Raises:
            UserError: `init` was called for batches of another size.
        """
        sampler = getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 1
        if self._runtime.has_begun:
            job = self._runtime.context()
            _require_sizes(job.policy, size, steps, job.warn)
            self._runtime.train_whole()
            return job
        return self._runtime.init_in_place(size * steps)

    def mean(self, value: torch.Tensor | float) -> float:
        """The mean over the global batch of what is a mean over this worker's part of it: ``elastic.mean(loss)`` (docs/plain_loop.md).

        The same on all workers. The loss of a step that was made is known already; anything else is a small collective, so the
        scripts of all workers must call it alike. Between two epochs it is the mean over the last batch.

        Args:
            value: a number, or a tensor of one element.

        Raises:
            UserError: it was called within the loop over micro-batches.
            WorldBroken: a worker is lost, and the step is torn.
        """
        if self._host is not None:
            return self._host.mean(value)
        state = self._runtime.in_training
        own = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
        return state.mean(own) if isinstance(state, TorchState) else own

    def evaluate(self, model: torch.nn.Module, loader: Any, metrics: Metrics) -> dict[str, float]:
        """Metrics over all samples of a loader's data set, each counted once: ``elastic.evaluate(model, loader, {"accuracy": accuracy})``.

        Each worker runs a part; all call it alike, between two steps, or in a script that does nothing else (docs/library.md). If a worker
        is lost meanwhile, it begins anew in the next world; each worker of a prepared loop runs all samples itself then.

        Args:
            model: whose output is one tensor with a row for each sample.
            loader: a ``torch.utils.data.DataLoader`` that was not prepared, and gives each sample once; batches are pairs (inputs, labels).
            metrics: functions ``(labels, outputs) -> float`` of all samples, on the CPU.

        Returns:
            The metrics by name, the same on all workers; NaN on a worker that is `catching_up`.

        Raises:
            UserError: the loader is another, outputs or labels are no tensors with a row for each sample, or neither `init` nor
                `prepare` has been called.
            WorldBroken: a worker was lost; `@elastic.run` knows what to do.
        """
        if self.catching_up():
            return dict.fromkeys(metrics, math.nan)
        require_whole(loader)
        if os.environ.get(PROCESS):
            raise UserError(
                "elastic.evaluate is for workers of one process: with --processes_per_worker evaluate in the script, on all processes alike"
            )
        job = self._host.job if self._host is not None else self._runtime.context()
        size, collate = loader.batch_size, loader.collate_fn
        evaluator = TorchEvaluator(model, loader.dataset, None, metrics, size, job, collate_fn=collate)
        if self._host is None:
            return self._runtime.evaluate(evaluator)
        found = self._host.agree(lambda: evaluator.evaluate().metrics)
        return found if found is not None else evaluator.evaluate(world=ALONE).metrics

    def values(self, **start: Any) -> Values:
        """What a script counts or remembers: ``values = elastic.values(step=0, best=0.0)``, then ``values.step += 1``.

        Given to `prepare`, it travels to workers that come later, and over ``elasticdl stop``. What was assigned in a step that the loop
        has to make once more is undone. It has ``state_dict``, for checkpoints (docs/whole_script.md).
        """
        return Values(**start)

    def on_one(self, act: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Have rank 0 do what is to be done once: ``elastic.on_one(torch.save, model.state_dict(), path)``. All workers call it.

        Where rank 0 is lost before the next step, the next rank 0 does it, from the same parameters; perhaps a second time. So ``act``
        should replace what is there already (docs/whole_script.md). A worker that is `catching_up` does nothing.
        """
        if self._host is not None:
            self._host.on_one(functools.partial(act, *args, **kwargs))
        elif self.rank() == 0:
            act(*args, **kwargs)

    def rank(self) -> int:
        """This worker's place in the present world; never 0 while it is `catching_up`: ``if elastic.rank() == 0:`` (docs/plain_loop.md)."""
        return self._runtime.rank() or int(self.catching_up())

    def catching_up(self) -> bool:
        """Whether this worker has come later, and its script is on its way to where the job stands.

        What the script computes meanwhile has no effect: ``if not elastic.catching_up(): evaluate()``, and nothing must be written
        (docs/plain_loop.md).
        """
        return self._host is not None and self._host.is_behind


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    # Adagrad has a state from the start, in which it has made no step.
    return any(state.get("step", 1) > 0 for state in optimizer.state.values())


def _require_sizes(policy: BatchPolicy, size: int, steps: int, warn: Callable[[str], None]) -> None:
    """``policy``: as `init` was told. ``size``: of the loader's batches, of which ``steps`` make one step."""
    if not policy.fixed:
        raise UserError(
            "elastic.prepare: elastic.init(batch_size_per_worker=) lets the global batch grow with the workers; a prepared loop has one "
            "global batch, of whose size init(global_batch_size) may be told"
        )
    expected, most = policy.batch_size(1), policy.max_micro_batch
    whole = size * steps
    if size > (most or size):
        raise UserError(
            f"elastic.prepare: the loader's batches have {size} samples, and elastic.init() was told that at most {most} fit a GPU: give it "
            "batch_size=elasticdl.elastic.batch_size"
        )
    if abs(whole - expected) >= steps:
        raise UserError(
            f"elastic.prepare: elastic.init() was told of global batches of {expected} samples, and the optimizer makes a step of "
            f"{whole}: {steps} {'batch' if steps == 1 else 'batches'} of {size}; give the loader batch_size=elasticdl.elastic.batch_size, and take "
            "elasticdl.ga.torch.optim.Optimizer(optimizer, elasticdl.elastic.steps)"
        )
    if whole != expected:
        warn(
            f"a global batch has {whole} samples, {steps} batches of {size}, where elastic.init() was told of {expected}"
        )
