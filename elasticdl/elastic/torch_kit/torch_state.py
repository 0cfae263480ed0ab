"""The training state of a PyTorch model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.core.training_step import Vote
from elasticdl.elastic.torch_kit.buffers import least_samples
from elasticdl.elastic.torch_kit.gradients import Remedy
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader, ElasticSampler
from elasticdl.elastic.torch_kit.model_attributes import TENSORS, holders_of_modules
from elasticdl.elastic.torch_kit.reducer import GradientReducer
from elasticdl.elastic.torch_kit.refusals import each_of, require_summable
from elasticdl.elastic.torch_kit.tensors import ElasticContext, sum_of_all
from elasticdl.elastic.torch_kit.torch_pieces import (
    GroupSettings,
    HeldAttributes,
    Model,
    MovedByPasses,
    Outside,
    Slots,
    TorchValue,
    outside_parameters,
    tensors_of,
)
from elasticdl.elastic.training import state
from elasticdl.elastic.training.attributes import Attributes

IS_OUTSIDE = (
    "are in no module that was given: they are trained, and what else is in their module, such as the statistics of a batch norm, is each "
    "worker's own: give the module along, as in {}"
)


@dataclass(frozen=True, slots=True)
class StepKind:
    """How the steps of a script are made."""

    cure: str  # for a step on too few samples
    gives_along: str  # how a further module is given
    # The script has a control flow of its own, which goes on over changes of the world: it begins its steps itself, makes one pass of a batch
    # while it is alone, leaves a parameter without a gradient where no worker has one, and goes on after its training.
    is_in_place: bool = False
    # Parameters change within a step: each pass is summed by itself, and a step that is torn begins again as a whole, with copies.
    updates_within: bool = False


OF_LIBRARY = StepKind("call batch.backward(loss) exactly once for each micro-batch", "TorchState(decoder=decoder)")


class TorchState(state.TrainingState):
    """See `elasticdl.elastic.training.state.TrainingState`.

    The optimizer needs no wrapper: its ``step()`` reduces the gradients of all workers first.
    """

    _value_piece = TorchValue
    _own_names = state.TrainingState._own_names | {"model", "optimizer", "loader", "attributes", "reducer"}
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
        kind: StepKind = OF_LIBRARY,
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
        self._kind, self._remedy, self._ends_with_function = kind, kind.cure, not kind.is_in_place
        self.model = model
        self.optimizer = optimizer
        self.loader = data if isinstance(data, ElasticDataLoader) else None
        self.attributes = Attributes(
            lambda: holders_of_modules(self._modules(), self.attributes.foreign), TENSORS, job.warn
        )
        self._share = (-1, 0.0)  # of this worker in the last batch, and in which world
        if sampler is not None and job.under_master:
            remedy = Remedy("batch.backward(loss)")
        self.reducer = GradientReducer(
            self._summed,
            self._modules(),
            job.collective,
            leaves_missing_grads_none=kind.is_in_place,
            refuses_moved=job.under_master and not kind.updates_within,
            remedy=remedy,
            warn=job.warn if job.under_master or remedy is not None else None,
            require_one=self._check.require_one,
        )
        if sampler is not None:
            sampler.attach(self.reducer, self._reduce, least_samples(self._modules()))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(lambda *_: self._step_made())
        self._moved = MovedByPasses(self.reducer, begins_steps=sampler is None and not kind.is_in_place)
        self._trained = (Model(model), Outside(self._modules, self.parameters), Slots(optimizer, job))
        for piece in self._trained:
            piece.is_copied = snapshot or kind.updates_within
        self._hold(HeldAttributes(self.attributes, self._modules, job), self._moved, *self._trained)

    def sync(self, world: World) -> None:
        if world.is_first and world.rank == 0:
            if not self._kind.is_in_place:  # there the script itself steps it as often on every worker
                self._warn_of_scheduler()
            strangers = outside_parameters(self._modules(), self.parameters())
            if strangers:
                shapes = [str(tuple(each.shape)) for each in strangers[:3]] + ["..."] * (len(strangers) > 3)
                what = f"parameters of the optimizer, of the shapes {', '.join(shapes)},"
                self._job.warn(f"{what} {IS_OUTSIDE.format(self._kind.gives_along)}")
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
        of_batch, of_state = self._check.ballot(batch.plan if batch else None)
        outcome = self.reducer.close(
            leaving=self._job.leaving,
            stopping=self._wants_to_stop,
            share=None if batch else part,
            batch=of_batch,
            state=of_state,
            scale=1.0 if batch else part,
        )
        self._share = (self._job.world.version, batch.share) if batch else (-1, 0.0)
        self._voted(outcome.vote, outcome.seconds)

    def _summed(self) -> Iterator[torch.nn.Parameter]:
        """Of which the gradients are summed in a step."""
        return iter(()) if self._kind.updates_within else self.parameters()

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
