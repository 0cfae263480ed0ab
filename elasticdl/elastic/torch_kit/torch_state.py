"""The training state of a PyTorch model.

With it the modules and schedulers that a script trains without having given them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.torch_kit.buffers import least_samples
from elasticdl.elastic.torch_kit.gradients import Remedy
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader, ElasticSampler
from elasticdl.elastic.torch_kit.model_attributes import TENSORS, holders_of_modules
from elasticdl.elastic.torch_kit.reducer import GradientReducer
from elasticdl.elastic.torch_kit.refusals import each_of, require_summable
from elasticdl.elastic.torch_kit.tensors import ElasticContext, sum_of_all
from elasticdl.elastic.torch_kit.torch_pieces import (
    Groups,
    GroupSettings,
    HeldAttributes,
    Model,
    MovedByPasses,
    Outside,
    Slots,
    TorchValue,
    tensors_of,
)
from elasticdl.elastic.training import state
from elasticdl.elastic.training.attributes import Attributes

# Which objects of a script hold something that elasticdl was given, and were not given along themselves.

Kind = TypeVar("Kind")
MOST_DICTS = 3  # from a parameter over a module's `_parameters` and its attributes to the module


def owners(values: Iterable[Any], kind: type[Kind]) -> list[Kind]:
    """Those of this kind that hold one of the values in an attribute, or in a dict that is one.

    Only what refers to a value is looked at. `gc.get_objects` would take hold of tuples that another thread is making, which breaks that.
    """
    found: dict[int, Kind] = {}
    inner, seen = list(values), set[int]()
    for _ in range(1 + MOST_DICTS):
        holders = gc.get_referrers(*inner) if inner else []
        found.update((id(each), each) for each in holders if issubclass(type(each), kind))
        inner = [each for each in holders if type(each) is dict and id(each) not in seen]
        seen.update(map(id, inner))
    return list(found.values())


# Modules that a script trains, and has not given along: they are known by the optimizer's parameters.

IS_OUTSIDE = (
    "that the optimizer trains is no part of the state, so its buffers are each worker's own: give it along, as in "
    "TorchState(decoder=decoder)"
)


def further_modules(
    model: torch.nn.Module, groups: Iterable[dict[str, Any]], known: Iterable[Any]
) -> list[torch.nn.Module]:
    """Further ones that a script trains, beside what is ``known``: those that have buffers, which forward passes may move.

    ``groups``: parameter groups of the optimizers.
    """
    trained = [each for group in groups for each in group["params"]]
    ours = [model, *(each for each in known if isinstance(each, torch.nn.Module))]
    within = {id(each) for one in ours for each in one.modules()}
    theirs = {id(each) for one in ours for each in one.parameters()}
    numbers = {id(each): number for number, each in enumerate(trained) if id(each) not in theirs}
    if not numbers:
        return []
    candidates: list[tuple[int, int, str, torch.nn.Module]] = []
    for each in _holders_of([each for each in trained if id(each) in numbers]):
        if id(each) in within:
            continue
        first = min((numbers[id(one)] for one in each.parameters() if id(one) in numbers), default=None)
        if first is None or not any(True for _ in each.buffers()):
            continue
        inner = [id(one) for one in each.modules()]
        if not within.intersection(inner):  # else it wraps the model, and its other parts are found by themselves
            candidates.append((first, -len(inner), type(each).__qualname__, each))
    found: list[torch.nn.Module] = []
    for *_, each in sorted(candidates, key=lambda candidate: candidate[:3]):  # the same order on all workers
        inner = [id(one) for one in each.modules()]
        if not within.intersection(inner):
            found.append(each)
            within.update(inner)
    return found


def _holders_of(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Module]:
    """The modules that have them, and those that these are in."""
    found: dict[int, torch.nn.Module] = {}
    last: list[Any] = list(parameters)
    while last:
        last = [each for each in owners(last, torch.nn.Module) if id(each) not in found]
        found.update((id(each), each) for each in last)
    return list(found.values())


class TorchState(state.TrainingState):
    """See `elasticdl.elastic.training.state.TrainingState`.

    The optimizer needs no wrapper: its ``step()`` reduces the gradients of all workers first.
    """

    _remedy = "call batch.backward(loss) exactly once for each micro-batch"
    _value_piece = TorchValue
    _own_names = state.TrainingState._own_names | {"model", "optimizer", "loader", "attributes", "reducer"}
    # Parameters that no worker has a gradient of have none after a step, instead of zeros.
    _leaves_absent_gradients = False
    _begins_steps_itself = False  # by `begin_step`
    _sums_each_pass = False  # and has nothing left to sum when the optimizer steps
    _begins_again = False  # a step that is torn, as a whole, though parameters have changed in it
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
        snapshot: bool = False,
        remedy: Remedy | None = None,
    ) -> None:
        """``data``: what tells where training stands in the data set. ``snapshot``: copy parameters and optimizer slots
        at each commit as well, for a loop that changes them otherwise than by ``optimizer.step()``.
        ``remedy``: see `GradientReducer`, for a loop over other batches.

        Raises:
            UserError: the optimizer is of a kind that can't be had.
        """
        for each in each_of(optimizer):
            require_summable(each, "TorchState")
        sampler = data.sampler if isinstance(data, ElasticDataLoader) else data
        super().__init__(job, tensors_of(job), GroupSettings(optimizer), sampler, values, snapshot=snapshot)
        self.model = model
        self.optimizer = optimizer
        self.loader = data if isinstance(data, ElasticDataLoader) else None
        self.foreign_attributes: frozenset[str] = frozenset()  # of modules: a library's
        self.attributes = Attributes(
            lambda: holders_of_modules(self._modules(), self.foreign_attributes), TENSORS, job.warn
        )
        self._share = (-1, 0.0)  # of this worker in the last batch, and in which world
        if sampler is not None and job.under_master:
            remedy = Remedy("batch.backward(loss)")
        self.reducer = GradientReducer(
            self._summed,
            self._modules(),
            job.collective,
            leaves_missing_grads_none=self._leaves_absent_gradients,
            refuses_moved=job.under_master and not self._begins_again,
            remedy=remedy,
            warn=job.warn if job.under_master or remedy is not None else None,
            require_one=self._require_one,
        )
        if sampler is not None:
            sampler.attach(self.reducer, self._reduce, least_samples(self._modules()))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._step_made())
        self._moved = MovedByPasses(self.reducer, begins_steps=sampler is None and not self._begins_steps_itself)
        self._trained = (Model(model), Outside(self._modules, self.parameters), Slots(optimizer, job))
        for piece in self._trained:
            piece.is_copied = snapshot or self._begins_again
        groups = Groups(self._modules, optimizer, may_be_undone=self._begins_again)
        self._hold(groups, HeldAttributes(self.attributes, self._modules, job), self._moved, *self._trained)

    def sync(self, world: World) -> None:
        if world.is_first and world.rank == 0:
            self._warn_of_strangers()
        super().sync(world)

    def _warn_of_strangers(self) -> None:
        """What trains and is no part of the state, as far as it shows."""
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
        for each in further_modules(self.model, self.optimizer.param_groups, self.values.values()):
            self._job.warn(f"a {type(each).__name__} {IS_OUTSIDE}")

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
        if self._job.size == 1:
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
        return sum_of_all(self._job, own * weight if weight else 0.0)

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
        if backward is not None:
            self.reducer.backward(backward, last=True)
        self._job.advance(Activity.WAIT)
        part = 1 / self._job.world.size
        outcome = self.reducer.close(
            leaving=self._job.leaving,
            stopping=self._wants_to_stop,
            share=None if batch else part,
            batch=self._batch_check.ballot(batch.plan if batch else None),
            state=self._check.ballot(),
            scale=1.0 if batch else part,
        )
        self._share = (self._job.world.version, batch.share) if batch else (-1, 0.0)
        self._voted(outcome.vote, outcome.seconds)

    def _summed(self) -> Iterator[torch.nn.Parameter]:
        """Of which the gradients are summed in a step."""
        return iter(()) if self._sums_each_pass else self.parameters()

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


# A script's schedulers, on a worker that has the job's state and is yet to come to where the job stands.


def rest_while(is_idle: Callable[[], bool], scheduler: LRScheduler) -> None:
    """Have its ``step`` do nothing where ``is_idle``: it stands where the job stands already, and a step past its last is an error.

    It has another class of the same name then: an attribute would be part of its state.
    """
    plain: Any = type(scheduler)

    class Resting(plain):  # type: ignore[misc]
        def step(self, *args: Any, **kwargs: Any) -> None:
            if not is_idle():
                super().step(*args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Saved or copied, it is what the script has made."""
            return object.__new__, (plain,), dict(vars(self))

    Resting.__name__, Resting.__qualname__, Resting.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    scheduler.__class__ = Resting
