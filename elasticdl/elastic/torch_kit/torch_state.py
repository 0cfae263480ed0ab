"""The training state of a PyTorch model, and its pieces."""

from __future__ import annotations

import copy
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree
from torch.utils.data import DataLoader, Dataset, Sampler

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.collectives.transfer import broadcast_state
from elasticdl.elastic.core.plan import plain_text
from elasticdl.elastic.core.protocol import SaveScope, World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.core.training_step import Vote
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader, ElasticSampler
from elasticdl.elastic.torch_kit.passes import Remedy, is_alike, least_samples, modules_of, named_buffers
from elasticdl.elastic.torch_kit.reducer import GradientReducer
from elasticdl.elastic.torch_kit.refusals import each_of, is_other_kind, require_summable
from elasticdl.elastic.torch_kit.shards import spread_of
from elasticdl.elastic.torch_kit.tensors import (
    ElasticContext,
    host_array,
    is_sharded,
    like,
    local,
    marks_of,
    sum_of_all,
)
from elasticdl.elastic.training import state
from elasticdl.elastic.training.attributes import Arrays, Attributes, Holder, is_scripts_own
from elasticdl.elastic.training.pieces import (
    UNCHANGING,
    Local,
    Piece,
    Settings,
    Tensors,
    Trained,
    Value,
)

# Settings of an optimizer that say how it computes, which workers on other devices may do otherwise; and no settings.
OF_EACH_WORKER = frozenset(("params", "foreach", "fused", "capturable"))
MAKE_THE_MODEL = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
COPIED_WHEN_LOADED = ("model", "optimizer", "caches")  # pieces that need not arrive on the device
MOST_TOLD = 300  # characters of what torch says of a state that does not fit
PREPARED = "prepared_"  # begins the names of what `elastic.prepare` was given beside model, optimizer and loader


Modules = Callable[[], Sequence[torch.nn.Module]]  # the model, and others that were given along


def tensors_of(job: ElasticContext) -> Tensors:
    return Tensors(
        marks_of,
        host_array,
        lambda dumped, **to_all: broadcast_state(dumped, job.collective, on_host=COPIED_WHEN_LOADED, **to_all),
        lambda dumped, file: torch.save(_pytree.tree_map_only(torch.Tensor, local, dumped), file),
        partial(torch.load, map_location="cpu", weights_only=False),
    )


class Model(Trained):
    """Parameters and persistent buffers."""

    name = "model"

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def dump(self) -> dict[str, Any]:
        return self._model.state_dict()

    def load(self, dumped: dict[str, Any]) -> None:
        present = self.dump() if any(map(is_sharded, self._model.parameters())) else {}
        try:
            self._model.load_state_dict(
                {name: like(present[name], each) if name in present else each for name, each in dumped.items()}
            )
        except RuntimeError as error:
            why = textwrap.shorten(
                str(error).partition("\n")[2] or str(error), MOST_TOLD
            )  # its first line names the kind alone
            raise UserError(
                f"the model here can't take that of the others: {why}; what is put into a model while it trains, as by "
                "pruning, does not reach a worker that comes later: make it with the model"
            ) from error

    def compared(self) -> Mapping[str, Any]:
        return {self.name: self.dump()}


class Caches(Trained):
    """Buffers that are not persistent, and so in no ``state_dict``. They may be caches of each worker's own, and are not compared."""

    name = "caches"

    def __init__(self, modules: Modules) -> None:
        self._modules = modules

    def dump(self) -> dict[str, Any]:
        modules = self._modules()
        return {each.name_in(modules): each.tensor for each in named_buffers(modules) if each.is_cache}

    @torch.no_grad()
    def load(self, dumped: dict[str, Any]) -> None:
        modules = self._modules()
        for named in named_buffers(modules) if dumped else ():
            value, now = dumped.get(named.name_in(modules)) if named.is_cache else None, named.tensor
            # Where the shapes differ each worker has its own.
            if value is not None and now is not None and is_alike(now, value.to(now.device)):
                now.copy_(value)


def outside_parameters(
    modules: Sequence[torch.nn.Module], parameters: Iterable[torch.nn.Parameter]
) -> list[torch.nn.Parameter]:
    """Those that the optimizer has and none of the modules."""
    within = {id(each) for module in modules_of(modules) for each in module._parameters.values()}
    return [each for each in parameters if id(each) not in within]


class Slots(Trained):
    """What an optimizer works out itself, as momentum. It is dumped with the optimizer's settings, as PyTorch does it."""

    name = "optimizer"

    def __init__(self, optimizer: Any, job: ElasticContext) -> None:
        self._optimizer = optimizer
        self._job = job

    def dump(self) -> dict[str, Any]:
        dumped: dict[str, Any] = self._optimizer.state_dict()
        return dumped

    def load(self, dumped: dict[str, Any]) -> None:
        if is_other_kind(dumped, self.dump()):
            raise UserError("the optimizer is of another kind than that which the state is of")
        if self._job.device.type != "cpu":
            self._optimizer.state.clear()  # else the old slots and the new ones are on the device at once
        try:
            self._optimizer.load_state_dict(self._sharded(dumped))
        except ValueError as error:
            raise UserError(
                f"the state does not fit the optimizer: {one_line(error)}; groups that are added in training are not added on other workers"
            ) from error

    def _sharded(self, dumped: dict[str, Any]) -> dict[str, Any]:
        """As the parameters are: what was received is what this process has of it."""
        if "optimizers" in dumped:
            return dumped
        every = [each for group in self._optimizer.param_groups for each in group["params"]]
        if not any(map(is_sharded, every)):
            return dumped
        slots = {
            number: {
                name: like(every[number], each) if _lies_as(each, every[number]) else each
                for name, each in held.items()
            }
            for number, held in dumped["state"].items()
        }
        return {**dumped, "state": slots}

    def compared(self) -> Mapping[str, Any]:
        slots = [
            {name: each for name, each in one.state_dict().items() if name != "param_groups"}
            for one in each_of(self._optimizer)
        ]
        return {self.name: slots if len(slots) > 1 else slots[0]}


def _lies_as(slot: Any, parameter: torch.Tensor) -> bool:
    """Whether a slot has a number for each of the parameter's that is here."""
    return isinstance(slot, torch.Tensor) and slot.dim() > 0 and local(slot).shape == local(parameter).shape


class GroupSettings(Settings):
    """Those of an optimizer's parameter groups. Rules apply to the first group's rate, and the others keep their ratio to it."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._own_rates: list[float] = []  # of the groups, before rules apply

    def dump(self) -> list[dict[str, Any]]:
        return [
            {
                key: value if type(value) in UNCHANGING else copy.deepcopy(value)
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def load(self, dumped: list[dict[str, Any]]) -> None:
        for group, saved in zip(self._optimizer.param_groups, dumped, strict=False):  # one may have been added since
            for key, value in saved.items():
                if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                    group[key].copy_(value)  # a scheduler, or a compiled step, may hold on to it
                else:
                    group[key] = value

    def told(self) -> Mapping[str, Any]:
        groups = [
            {
                key: value if type(value) in UNCHANGING else _as_set(value)
                for key, value in group.items()
                if key not in OF_EACH_WORKER
            }
            for group in self._optimizer.param_groups
        ]
        return {"optimizer.param_groups": groups}

    @property
    def rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def own_rate(self) -> float:
        # Kept in each group as torch's schedulers do: it may come from a checkpoint.
        groups = self._optimizer.param_groups
        self._own_rates = [float(group.setdefault("initial_lr", float(group["lr"]))) for group in groups]
        return self._own_rates[0]

    def set_rate(self, rate: float) -> None:
        groups = self._optimizer.param_groups
        for group in groups[len(self._own_rates) :]:  # added since
            self._own_rates.append(float(group.setdefault("initial_lr", float(group["lr"]))))
        first = self._own_rates[0]
        for group, own in zip(groups, self._own_rates, strict=True):
            value = rate if own == first or not first else own * (rate / first)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value


class HeldAttributes(Piece):
    """What modules and callbacks hold in attributes, and which parameters are trained."""

    name = "attributes"
    in_checkpoints = False

    def __init__(self, attributes: Attributes, modules: Modules, job: ElasticContext) -> None:
        self._attributes = attributes
        self._modules = modules
        self._job = job

    def keep(self) -> None:
        self._attributes.commit(may_be_torn=not self._job.is_alone)

    def undo(self) -> None:
        self._attributes.restore()

    def dump(self) -> dict[str, Any]:
        trained = {name: parameter.requires_grad for name, parameter in named_parameters(self._modules())}
        return {**self._attributes.dump(), "trained": trained}

    def load(self, dumped: dict[str, Any]) -> None:
        self._attributes.load(dumped)
        for name, parameter in named_parameters(self._modules()):
            parameter.requires_grad_(dumped["trained"].get(name, parameter.requires_grad))

    def compared(self) -> Mapping[str, Any]:
        return self._attributes.compared()


class MovedByPasses(Local):
    """Buffers. They travel with the model. As they were before the step in hand, the reducer has them."""

    name = "moved by passes"
    kept_with = SaveScope.WITH_PARAMETERS

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._is_in_hand = False  # a step

    def begin_step(self) -> None:
        """The reducer knows of it."""
        self._is_in_hand = True

    def keep(self) -> None:
        self._is_in_hand = False

    def undo(self) -> None:
        if self._is_in_hand:
            self._reducer.reset_buffers()


class TorchValue(Value):
    """See `elasticdl.elastic.training.pieces.Value`."""

    @property
    def makes_model(self) -> bool:
        # A scheduler that is wrapped, as by accelerate, is of another class.
        value = self.value
        return isinstance(value, MAKE_THE_MODEL) or (hasattr(value, "optimizer") and hasattr(value, "state_dict"))

    @property
    def title(self) -> str:
        if not self.makes_model:
            return type(self.value).__name__ if self.name.startswith(PREPARED) else self.name
        if isinstance(self.value, torch.nn.Module | torch.optim.Optimizer):
            return self.name
        return "scaler" if isinstance(self.value, torch.amp.GradScaler) else "scheduler"


def _as_set(value: Any) -> Any:
    """A setting as it can be written out; of one on a GPU nobody asks at each step."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.device.type == "cpu" else None
    return value if type(value) is tuple else plain_text(value)


def named_parameters(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for number, root in enumerate(modules):
        for name, parameter in root.named_parameters():
            yield f"{number}:{name}", parameter


# Whose attributes are sent to workers that come later, with PyTorch: those of modules, and of callbacks that have no state of their own.

OF_A_MODULE = frozenset(vars(torch.nn.Module()))  # what each has of torch
OF_SHARED_MODULES = "__composable_api_"  # begins what fully_shard keeps in a module


def holders_of_modules(roots: Sequence[torch.nn.Module], foreign: AbstractSet[str]) -> Iterator[Holder]:
    """Within a step those of the script's own classes may change, and are read. ``foreign``: attributes that are a library's."""
    for number, root in enumerate(roots):
        for path, module in root.named_modules():
            kind: Any = type(module)
            title = f"{kind.__name__} {path}".rstrip()
            is_own = not path or is_scripts_own(kind)
            remedy = "give it get_extra_state and set_extra_state"
            shared = {each for each in vars(module) if each.startswith(OF_SHARED_MODULES)}
            yield Holder(f"{number}:{path}", title, module, OF_A_MODULE | foreign | shared, is_own, True, remedy)


def holders_of_callbacks(callbacks: Iterable[Any], packages: tuple[str, ...], remedy: str) -> Iterator[Holder]:
    """One for each callback of the script's own. Callbacks of these packages have a state of their own."""
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    for callback in callbacks:
        kind: Any = type(callback)
        if kind.__module__.partition(".")[0] not in packages:
            name = f"callback {kind.__qualname__} {next(numbers[kind.__qualname__])}"
            yield Holder(name, f"the callback {kind.__name__}", callback, remedy=remedy)


def _is_tensor(value: Any) -> bool:
    """One that is sent; those that are trained are the state's."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not (value.is_leaf and value.requires_grad)
        and not is_lazy(value)
    )


def _fill(present: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if (present.shape, present.dtype) != (value.shape, value.dtype):
        return value.clone()
    present.data.copy_(value)  # a backward pass that is yet to come has noted the versions
    return present


TENSORS = Arrays(
    _is_tensor,
    lambda tensor: tensor.detach().clone(),
    _fill,
    host_array,
    (
        *(torch.optim.Optimizer, LRScheduler, Dataset, DataLoader, Sampler, torch.nn.Parameter),
        *(torch.dtype, torch.device, torch.Size),
    ),
)


# The state.


class TorchState(state.TrainingState):
    """See `elasticdl.elastic.training.state.TrainingState`.

    The optimizer needs no wrapper: its ``step()`` reduces the gradients of all workers first.
    """

    _value_piece = TorchValue
    _remedy = "call batch.backward(loss) exactly once for each micro-batch"
    sampler: ElasticSampler | None
    _job: ElasticContext

    def __init__(
        self,
        job: ElasticContext,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        data: ElasticDataLoader | ElasticSampler | None,
        values: dict[str, Any],
        *,
        remedy: Remedy | None = None,
        updates_within: bool = False,
    ) -> None:
        """``data``: what tells where training stands in the data set. ``remedy``: see `GradientReducer`, for a loop over
        other batches. ``updates_within``: parameters change within a step: each pass is summed by itself, and a step that is torn
        begins again as a whole, with copies.

        Raises:
            UserError: the optimizer is of a kind that can't be had, or has parameters of nobody.
        """
        for each in each_of(optimizer):
            require_summable(each, "TorchState")
        sampler = data.sampler if isinstance(data, ElasticDataLoader) else data
        super().__init__(job, tensors_of(job), GroupSettings(optimizer), sampler, values)
        self._updates_within = updates_within
        if job.inside.size > 1:
            job.spread = spread_of(
                [model, *(each for each in values.values() if isinstance(each, torch.nn.Module))], job.inside
            )
        self._share = (-1, 0.0)  # of this worker in the last batch, and in which world
        self.model = model
        self.optimizer = optimizer
        if strangers := outside_parameters(self._modules(), self.parameters()):
            shapes = [str(tuple(each.shape)) for each in strangers[:3]] + ["..."] * (len(strangers) > 3)
            raise UserError(
                f"parameters of the optimizer, of the shapes {', '.join(shapes)}, are in no module that was given, so a worker that comes later would not have "
                "them: give elastic.prepare or TorchState their module along, and a parameter by itself in a torch.nn.ParameterList; a trainer's model holds them"
            )
        self.loader = data if isinstance(data, ElasticDataLoader) else None
        self.attributes = Attributes(
            lambda: holders_of_modules(self._modules(), self.attributes.foreign), TENSORS, job.warn
        )
        if sampler is not None and job.under_master:
            remedy = Remedy("batch.backward(loss)")
        self.reducer = GradientReducer(
            self._summed,
            self._modules(),
            job.collective,
            refuses_moved=job.under_master and not updates_within,
            remedy=remedy,
            require_one=self._check.require_one,
            spread=job.spread,
        )
        if sampler is not None:
            sampler.attach(self.reducer, self._reduce, least_samples(self._modules()))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._step_made())
        self._moved = MovedByPasses(self.reducer)
        self._trained = (Model(model), Caches(self._modules), Slots(optimizer, job))
        for piece in self._trained:
            piece.is_copied = updates_within
        self._hold(HeldAttributes(self.attributes, self._modules, job), self._moved, *self._trained)

    def sync(self, world: World) -> None:
        if (
            world.is_first and world.rank == 0 and self.sampler is not None
        ):  # else the script itself steps it as often on every worker
            self._warn_of_scheduler()
        super().sync(world)

    def _warn_of_scheduler(self) -> None:
        """One that sets the rate and is no part of the state, as far as it shows."""
        # A scheduler leaves that mark.
        scheduled = [one for one in each_of(self.optimizer) if any("initial_lr" in group for group in one.param_groups)]
        optimizers = [getattr(value, "optimizer", None) for value in self.values.values()]
        # They may be wrapped, as by accelerate.
        held = [*optimizers, *(getattr(each, "optimizer", None) for each in optimizers)]
        all_held = all(any(each is known for known in held) for each in scheduled)
        if not all_held and self.rate is None:
            self._job.warn(
                "a scheduler sets the optimizer's learning rate and is not part of the state: a newcomer begins with it anew; "
                "give it along, as in TorchState(scheduler=scheduler)"
            )

    def reduce_gradients(self) -> None:
        """Sum the gradients of all workers now, for what needs them before ``optimizer.step()``: clipping, a GradScaler.

        Nothing is left to do after `StepBatch.backward` of this worker's last micro-batch.

        Raises:
            UserError: the workers train different parameters.
            WorldBroken: the step is torn; parameters are untouched.
        """
        self._reduce(None)

    def mean(self, own: float) -> float:
        """The mean over the global batch of what is ``own`` over this worker's part of it; between two epochs, over that of the last
        step. All workers ask alike.

        Raises:
            UserError: workers ask by different numbers, as within the loop over micro-batches.
            WorldBroken: a worker is lost, and the step is torn.
        """
        if self._job.is_alone:
            return own
        batch = self.sampler.current if self.sampler is not None else None
        if batch is not None and batch.untaken > 0:
            raise UserError(
                "elastic.mean() was called before the batch's last micro-batch, of which workers have different numbers: call it after the "
                "loop over micro-batches, for what is a mean over all that this worker has"
            )
        if batch is not None:
            self._share = (self._job.world.version, batch.share)
        version, share = self._share
        weight = share if version == self._job.world.version else 1 / self._job.size
        return sum_of_all(self._job, own * weight if weight else 0.0)[0]

    def _cast_end_vote(self, state: int) -> Vote:
        return self.reducer.end(state)

    # -- around optimizer.step() --

    def _before_step(self, *_: Any) -> None:
        self.reduce_gradients()
        self._before_update()

    def _reduce(self, backward: Callable[[], object] | None) -> None:
        """``backward`` makes the last gradients of this step; None if they are there."""
        if self._position.is_reduced:
            if backward is not None:
                raise UserError(f"the gradients of this step are reduced already: {self._remedy}")
            return
        batch = self.sampler.current if self.sampler is not None else None
        if batch is None:
            raise UserError(
                "a step was made without a batch: make each within the loop over the loader that the state was given"
            )
        if backward is not None:
            self.reducer.backward(backward, last=True)
        self._job.advance(Activity.WAIT)
        of_batch, of_state = self._check.ballot(batch.plan)
        sums = self.reducer.close(
            leaving=self._job.leaving, stopping=self._wants_to_stop, batch=of_batch, state=of_state
        )
        self._share = (self._job.world.version, batch.share)
        self._voted(sums.vote, sums.seconds)

    def _summed(self) -> Iterator[torch.nn.Parameter]:
        """Of which the gradients are summed in a step."""
        return iter(()) if self._updates_within else self.parameters()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of the optimizer; each once, also where two optimizers have it."""
        every = {id(each): each for group in self.optimizer.param_groups for each in group["params"]}
        return iter(every.values())

    def _step_begins(self) -> None:
        self.attributes.begin()
        super()._step_begins()
        self._moved.begin_step()

    def _shapes(self) -> dict[str, str]:
        made = {
            name: each
            for name, each in self.model.named_parameters()
            if not isinstance(each, torch.nn.UninitializedParameter)
        }
        return {name: f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for name, each in made.items()}

    def _modules(self) -> list[torch.nn.Module]:
        """The model, and others that were given along: their buffers are summed and saved like its own."""
        others = [each for each in self.values.values() if isinstance(each, torch.nn.Module)]
        return [self.model, *others]
