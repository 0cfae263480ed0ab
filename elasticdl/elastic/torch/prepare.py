"""A plain training loop, made elastic in one line: what a script holds is made to speak to a `View`."""

from __future__ import annotations

import functools
import gc
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from elasticdl.common.errors import UserError
from elasticdl.elastic.script.runtime import ScriptRuntime
from elasticdl.elastic.torch.context import ElasticContext
from elasticdl.elastic.torch.optimizers import Optimizers, require_summable
from elasticdl.elastic.torch.parts import Batches, RandomStreams
from elasticdl.elastic.torch.stand_in import StandIn
from elasticdl.elastic.torch.view import View
from elasticdl.elastic.torch.view_state import PREPARED
from elasticdl.elastic.training.stateful import Stateful

# By the name of their type, as some are in packages that may not be installed.
WRAPPERS = {
    "DistributedDataParallel": "give the module within: gradients are summed anyway",
    "DataParallel": "give the module within: each worker has one device",
    "FullyShardedDataParallel": "each worker holds the whole model",
    "FSDPModule": "each worker holds the whole model",
}


_SET_BY_LAUNCHERS = (
    "; RANK is in the environment, by which libraries do so of themselves: unset it, WORLD_SIZE and MASTER_ADDR"
)


class PreparedLoader:
    """The script's own loader, as far as the script can tell; each worker loads its part of each batch."""

    def __init__(self, loader: DataLoader[Any], view: View) -> None:
        self._loader = loader
        self._view = view
        self._turns = 0  # loops over it that were begun

    def __len__(self) -> int:
        """Batches of an epoch, whatever the number of workers."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in vars(self):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        self._turns += 1
        turn = self._turns
        view = self._view
        view.begin_epoch()
        number, version = 0, -1
        loaded: Iterator[Any] = iter(())
        stand_in: StandIn | None = None
        try:
            while number < len(view.drawn) or view.repeats:
                if view.repeats:
                    number, version = view.begin_repeating(), -1
                if not view.may_give(number):
                    stand_in = view.stand_in(view.drawn[number]) if stand_in is None else stand_in
                    yield stand_in.take()
                else:
                    batch = view.drawn[number]
                    if version != view.world_version:
                        version = view.world_version
                        loaded = view.load(batch, map(view.part_of, view.drawn[number:]))
                    view.seed(batch)
                    sample = next(loaded)
                    view.give(batch, view.part_of(batch), sample)
                    yield sample
                self._require_one_loop(turn)
                number += 1
            view.end_epoch()
        finally:
            if turn == self._turns:
                view.pause()

    def _require_one_loop(self, turn: int) -> None:
        if turn != self._turns:
            raise UserError("the prepared loader is looped over twice at once; expected one loop after the other")


class PlainLoop:
    """What a script with a plain training loop calls."""

    def __init__(self, runtime: ScriptRuntime[ElasticContext]) -> None:
        self._runtime = runtime
        self._view: View | None = None  # from `prepare` on

    def prepare(self, model: Any, optimizer: Any, loader: Any, *others: Any) -> tuple[Any, ...]:
        """Make a plain training loop elastic: ``model, optimizer, loader = elastic.prepare(model, optimizer, loader)``.

        The loop is otherwise unchanged. The loader's batches are the global batches, of each of which the script is given
        this worker's part. ``others``: further optimizers, and objects with ``state_dict``, such as a GradScaler, whose state travels to
        workers that come later; the optimizers' schedulers are found. Returns all of them, in order. See docs/plain_loop.md.

        Raises:
            UserError: one of them is of a kind that can't be had, or `init` or `prepare` was called before.
        """
        streams = RandomStreams.capture()
        sampler = getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None) or 1
        job = self._runtime.init(global_batch_size=size)
        RandomStreams.restore(streams)  # they are the script's
        optimizers = [optimizer, *(each for each in others if isinstance(each, torch.optim.Optimizer))]
        for each in optimizers:
            require_plain(model, each)
        batches = Batches(loader)
        for each in others:
            if not isinstance(each, Stateful):
                raise UserError(
                    f"elastic.prepare: a {type(each).__name__} has no state_dict and load_state_dict, by which it could travel to a "
                    "worker that comes later"
                )

        def travelling() -> dict[str, Any]:
            given = [each for each in others if not isinstance(each, torch.optim.Optimizer)]
            every = [*given, *(found for each in optimizers for found in schedulers_of(each, others))]
            return {f"{PREPARED}{number}": each for number, each in enumerate(every)}

        trained = Optimizers(optimizers) if len(optimizers) > 1 else optimizer
        self._view = view = View(job, model, trained, batches, travelling, self._runtime.leave)
        self._runtime.train_in_place(view.finish, view.about_failure)
        for each in optimizers:
            _speak_to(view, each)
        return (model, optimizer, PreparedLoader(loader, view), *others)

    def mean(self, value: torch.Tensor | float) -> float:
        """The mean over the global batch of what is a mean over this worker's part of it, such as the loss.

        The same on all workers. The loss of a step that was made is known already; anything else is a small collective, so the
        scripts of all workers must call it alike.
        """
        return self._view.mean(value) if self._view is not None else float(value)

    def rank(self) -> int:
        """This worker's place in the present world; never 0 while it is `catching_up`."""
        return self._runtime.rank() or int(self.catching_up())

    def catching_up(self) -> bool:
        """Whether this worker has come later, and its script is on its way to where the job stands.

        What the script computes meanwhile has no effect: an evaluation may be left out, and nothing must be written.
        """
        return self._view is not None and self._view.is_idle


def require_plain(model: Any, optimizer: Any, who: str = "elastic.prepare") -> None:
    """``who``: has been given them, for messages.

    Raises:
        UserError: they are made for another way of training on several devices, or can't be had.
    """
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{who}: the model is a {type(model).__name__}; expected one torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{who}: the optimizer is a {type(optimizer).__name__}; expected one of torch.optim")
    require_summable(optimizer, who)
    if dist.is_available() and dist.is_initialized():
        raise UserError(
            f"{who}: torch.distributed is initialized: leave init_process_group out, as workers come and go, and find "
            f"each other through the job{_SET_BY_LAUNCHERS if 'RANK' in os.environ else ''}"
        )
    for name, module in model.named_modules():
        where = f"{who}: {name or 'the model'} is a {type(module).__name__}"
        if isinstance(module, torch.nn.SyncBatchNorm):
            raise UserError(f"{where}, which needs a process group: leave convert_sync_batchnorm out")
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS:
                raise UserError(f"{where}: {WRAPPERS[kind.__name__]}")


def schedulers_of(optimizer: torch.optim.Optimizer, known: Sequence[Any]) -> list[LRScheduler]:
    """Those that a script has made and not given to `prepare`. The optimizer itself does not know them.

    Raises:
        UserError: there are several, which workers could take for one another.
    """
    every = [each for each in gc.get_objects() if issubclass(type(each), LRScheduler) and each.optimizer is optimizer]
    within = [inner for each in every for inner in getattr(each, "_schedulers", ())]
    found = [each for each in every if not any(each is other for other in (*within, *known))]
    if len(found) > 1:
        names = ", ".join(sorted(type(each).__name__ for each in found))
        raise UserError(
            f"elastic.prepare: give the optimizer's schedulers along ({names}), as prepare(model, optimizer, loader, a, b)"
        )
    return found


def _speak_to(view: View, optimizer: torch.optim.Optimizer) -> None:
    own_step, own_zero_grad = optimizer.step, optimizer.zero_grad

    @functools.wraps(own_step)
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        result = view.step(optimizer, lambda: own_step(**options), closure)
        # A scheduler would warn otherwise on a worker that is catching up, whose own step is not called.
        self._opt_called = True  # type: ignore[attr-defined]
        return result

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        view.zero_gradients(optimizer, lambda: own_zero_grad(set_to_none))

    # Bound methods, as torch's schedulers take the function out of one.
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
