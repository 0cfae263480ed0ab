"""What can't be had, with workers that come and go, of a script's model, optimizer and loader: each is refused in one line."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from elasticdl.common.credentials import PROCESS, SEVERAL
from elasticdl.common.errors import UserError

# Several optimizers as one, and those that can't be had.


class Optimizers:
    """Those of a script as one, as far as a training state can tell.

    They step by themselves. `made` says that they have done so for this batch.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.every = optimizers
        self._hooks: list[Callable[..., Any]] = []

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.every for group in each.param_groups]

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Each once."""
        every = (parameter for group in self.param_groups for parameter in group["params"])
        return list({id(parameter): parameter for parameter in every}.values())

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return {}  # `load_state_dict` clears theirs

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [each.state_dict() for each in self.every]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each, saved in zip(self.every, state["optimizers"], strict=True):
            each.state.clear()
            each.load_state_dict(saved)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> None:
        self._hooks.append(hook)

    register_step_post_hook = register_step_pre_hook

    def made(self) -> None:
        for hook in self._hooks:
            hook(self)


def each_of(optimizer: Any) -> Sequence[torch.optim.Optimizer]:
    """``optimizer``: one, or `Optimizers`."""
    return optimizer.every if isinstance(optimizer, Optimizers) else [optimizer]


def is_other_kind(there: Any, here: Any) -> bool:
    """Whether these states are of optimizers of two kinds."""
    if ("optimizers" in there) != ("optimizers" in here):
        return True
    if "optimizers" in there:
        pairs = zip(there["optimizers"], here["optimizers"], strict=False)
        return len(there["optimizers"]) != len(here["optimizers"]) or any(is_other_kind(*each) for each in pairs)
    groups = zip(there["param_groups"], here["param_groups"], strict=False)
    # Both have options that the other lacks; a newer version of the same optimizer only has more of them.
    return any(was.keys() - now.keys() and now.keys() - was.keys() for was, now in groups)


def require_summable(optimizer: torch.optim.Optimizer, who: str) -> None:
    """Raises:
    UserError: it needs gradients of a kind that workers can't sum for it, or sums them itself.
    """
    kind = type(optimizer)
    if any(each.__name__ == "AcceleratedOptimizer" for each in kind.__mro__):
        raise UserError(
            f"{who}: the optimizer was prepared by accelerate, for its own launcher: leave Accelerator out, and give the model, optimizer and "
            "loader that accelerator.prepare was given"
        )
    if hasattr(optimizer, "_allreduce_grad_async"):
        raise UserError(
            f"{who}: the optimizer is Horovod's DistributedOptimizer: give the one within: gradients are summed anyway"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            f"{who}: LBFGS evaluates its closure several times a step, and the workers would sum but one of the gradients: "
            "take an optimizer that needs each gradient once"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UserError(
            f"{who}: SparseAdam takes sparse gradients alone, and the sum over several workers is a dense one: take Adagrad or "
            "SGD, which take both, or Adam with Embedding(sparse=False)"
        )


# By the name of their type, as some are in packages that may not be installed.
WRAPPERS = {
    "DistributedDataParallel": "give the module within: gradients are summed anyway",
    "DataParallel": "give the module within: each worker has one device",
    "FullyShardedDataParallel": "take fully_shard, with --processes_per_worker",
    "FSDPModule": "give --processes_per_worker, the processes among which it is sharded",
}
ITERATED_PLAINLY = ("torch", "accelerate")  # whose loaders give what torch's gives
TRAINS_ONCE = "trains several times, and a script trains once"


def refuse(who: str, reasons: Iterable[str]) -> None:
    """``who``: has been given what is refused. ``reasons``: what can't be had, and what to do instead.

    Raises:
        UserError: there is a reason, of which the first is told.
    """
    for why in reasons:
        raise UserError(f"{who}: {why}")


def require_plain(model: Any, optimizer: Any, who: str = "elastic.prepare") -> None:
    """Raises:
    UserError: they are made for another way of training on several devices, or can't be had.
    """
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{who}: the model is a {type(model).__name__}; expected one torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"{who}: the optimizer is a {type(optimizer).__name__}; expected one of torch.optim")
    require_summable(optimizer, who)
    refuse(who, of_shared() if os.environ.get(PROCESS) else of_group())
    refuse(who, of_modules(model))


def of_shared() -> Iterator[str]:
    """Of a worker of several processes."""
    if not dist.is_initialized():
        yield (
            "this worker has several processes (--processes_per_worker), and the model is to be shared among them: call "
            "torch.distributed.init_process_group() and shard the model before"
        )


def of_group() -> Iterator[str]:
    if os.environ.get(PROCESS):
        yield SEVERAL
    if dist.is_available() and dist.is_initialized():
        launched = (
            "; RANK is in the environment, by which libraries do so of themselves: unset it, WORLD_SIZE and MASTER_ADDR"
        )
        yield (
            "torch.distributed is initialized: leave init_process_group out, as workers come and go, and find each other "
            f"through the job{launched if 'RANK' in os.environ else ''}"
        )


def of_modules(model: torch.nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        what = f"{name or 'the model'} is a {type(module).__name__}"
        if isinstance(module, torch.nn.SyncBatchNorm):
            yield f"{what}, which needs a process group: leave convert_sync_batchnorm out"
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS and not (kind.__name__ == "FSDPModule" and os.environ.get(PROCESS)):
                yield f"{what}: {WRAPPERS[kind.__name__]}"


def of_data(data: Any) -> Iterator[str]:
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        yield (
            f"the training data is a {type(data).__name__}, and what is only iterated over can't be divided among workers that come and go: "
            "give a data set with __len__ and __getitem__"
        )


def of_loader(loader: Any) -> Iterator[str]:
    """Why it can't be loaded in parts."""
    if not isinstance(loader, DataLoader):
        yield f"the loader is a {type(loader).__name__}; expected a torch.utils.data.DataLoader"
        return
    if any(kind.__name__ == "StatefulDataLoader" for kind in type(loader).__mro__):
        yield (
            "the loader is a StatefulDataLoader, whose state says nothing where a batch is loaded in parts: take torch.utils.data.DataLoader; what "
            "`elasticdl stop` keeps has the place within the epoch"
        )
    for name in ("__iter__", "_get_iterator"):
        own = next((kind for kind in type(loader).__mro__ if name in vars(kind)), DataLoader)
        if own.__module__.partition(".")[0] not in ITERATED_PLAINLY:
            yield (
                f"the loader is a {own.__name__}, whose own {name} is not called where a batch is loaded in parts: "
                "do what it does in collate_fn, in the sampler or in the training step"
            )
    if isinstance(loader.dataset, IterableDataset):
        yield from of_data(loader.dataset)
    if loader.batch_sampler is None:
        yield "DataLoader(batch_size=None) makes no batches: give it a batch_size"
    try:
        batches = len(loader)
    except TypeError:
        yield "the loader's sampler has no length; expected one with __len__"
    else:
        if not batches:
            yield "the loader has no batch; expected at least one in an epoch"


def refuse_new_groups(optimizer: Any, remedy: str) -> None:
    """A trainer begins: from here on its optimizers have the groups that they have.

    A worker that comes later begins where the job stands, and what has added a group is not run there.
    """
    for each in each_of(optimizer):

        def add_param_group(this: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
            raise UserError(
                f"a group of parameters was added to {type(this).__name__} while the trainer trains, and a worker that comes later would not "
                f"have it: {remedy}"
            )

        each.add_param_group = types.MethodType(add_param_group, each)  # type: ignore[method-assign]


def require_whole(loader: Any) -> None:
    """Raises UserError if not each sample of the loader's data set counts once in an evaluation."""
    sampler: Any = getattr(loader, "sampler", None)
    is_shuffled = isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == len(loader.dataset)
    gives_all = isinstance(loader, DataLoader) and (is_shuffled or isinstance(sampler, SequentialSampler))
    if not gives_all or not len(sampler) or loader.batch_size is None or loader.drop_last:
        raise UserError(
            "elastic.evaluate: expected a DataLoader of torch's that gives each sample of its data set once, in batches: for a part of a "
            "data set give it torch.utils.data.Subset(dataset, indices), and neither sampler nor drop_last"
        )
