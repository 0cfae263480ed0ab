"""The training state of a PyTorch model."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy.typing as npt
import torch
from torch.optim.lr_scheduler import LRScheduler

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.elastic.core.plan import StepPlan
from elasticdl.elastic.core.protocol import SaveScope, World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.core.training_step import Vote
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader, ElasticSampler
from elasticdl.elastic.torch_kit.own_loader import OwnLoader
from elasticdl.elastic.torch_kit.passes import Buffers, Remedy, least_samples
from elasticdl.elastic.torch_kit.reducer import GradientReducer, Sums
from elasticdl.elastic.torch_kit.refusals import Optimizers, each_of, require_summable
from elasticdl.elastic.torch_kit.tensors import ElasticContext, sum_of_all
from elasticdl.elastic.torch_kit.torch_pieces import (
    TENSORS,
    GroupSettings,
    HeldAttributes,
    Model,
    MovedByPasses,
    Outside,
    Slots,
    TorchValue,
    holders_of_modules,
    outside_parameters,
    tensors_of,
)
from elasticdl.elastic.training import state
from elasticdl.elastic.training.attributes import Attributes
from elasticdl.elastic.training.kept_state import REMEDY
from elasticdl.elastic.training.pieces import Piece, load_all

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
        remedy: Remedy | None = None,
        kind: StepKind = OF_LIBRARY,
    ) -> None:
        """``data``: what tells where training stands in the data set. ``remedy``: see `GradientReducer`, for a loop over
        other batches.

        Raises:
            UserError: the optimizer is of a kind that can't be had.
        """
        for each in each_of(optimizer):
            require_summable(each, "TorchState")
        sampler = data.sampler if isinstance(data, ElasticDataLoader) else data
        super().__init__(job, tensors_of(job), GroupSettings(optimizer), sampler, values)
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
            piece.is_copied = kind.updates_within
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
        sums = self.reducer.close(
            leaving=self._job.leaving,
            stopping=self._wants_to_stop,
            share=None if batch else part,
            batch=of_batch,
            state=of_state,
            scale=1.0 if batch else part,
        )
        self._share = (self._job.world.version, batch.share) if batch else (-1, 0.0)
        self._voted(sums.vote, sums.seconds)

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


# The training state of a script whose control flow goes on over changes of the world.

SCHEDULED = "scheduled"  # in a state that was sent: settings that rank 0's schedulers have made since


IN_PLACE = StepKind(
    "the workers' loops go different ways: they must call optimizer.step() after the same batches",
    "prepare(model, optimizer, loader, decoder)",
    is_in_place=True,
)


class LoopState(TorchState):
    """The training state of a script whose control flow goes on over changes of the world.

    What another worker has sent waits here until the script stands where the job stands. Only then it takes effect, so that nothing is lost by
    what the script does on its way; others are sent it as it came.
    """

    def __init__(
        self,
        job: ElasticContext,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
        values: dict[str, Any],
        batches: OwnLoader | None = None,
        kind: StepKind = IN_PLACE,
        remedy: Remedy | None = None,
    ) -> None:
        super().__init__(job, model, cast(torch.optim.Optimizer, optimizer), None, values, kind=kind, remedy=remedy)
        self._was_given = False
        self._received: dict[str, Any] | None = None
        self._is_of_file = False  # what was received last
        self._is_early: list[Piece] = []  # what took effect when it was received
        self.batches = batches  # of the script's loader, once they are known
        self.sources += [batches.source] if batches is not None else []

    # -- what another worker has sent --

    @property
    def waits(self) -> bool:
        """Another worker's state has come, and is yet to take the place of this one's."""
        return self._received is not None

    @property
    def weights(self) -> Any:
        """Of the model, as the job has them."""
        return self.sent()["model"]

    def load(self, unpacked: dict[str, Any]) -> None:
        super().load(unpacked)
        self._is_of_file = True

    def receive(self, sent: dict[str, Any]) -> None:
        self._received, self._is_of_file = sent, False
        # Hooks that are yet to begin training do so on all workers alike, from the same attributes.
        has_begun = sent.get("attributes", {}).get("has_begun", True)
        self._is_early = [
            each for each in self.pieces if each.shows_the_way or (each.name == "attributes" and not has_begun)
        ]
        load_all(self._is_early, sent)

    def arrive(self) -> None:
        """The script stands where the job stands: what it has done since another's state came has no effect."""
        self.reducer.drop_gradients()
        received, self._received = self._received, None
        if received is None:
            return
        self._moved.undo()
        self.values.update({name: value for name, value in received["values"].items() if name not in self.values})
        try:
            load_all((each for each in self.pieces if each.travels and each not in self._is_early), received)
        except Exception as error:  # the script's own objects may raise anything
            if not self._is_of_file or self.resumed is None:
                raise
            raise UserError(f"{self.resumed[0]} does not fit: {one_line(error)}; {REMEDY}") from error
        if SCHEDULED in received:
            self.settings.load(received[SCHEDULED])
        self._job.loaded(self.progress)

    def sent(self, *, to_file: bool = False) -> dict[str, Any]:
        return super().sent(to_file=to_file) if self._received is None else self._received

    def save(self, scope: SaveScope) -> None:
        if not self.waits:
            super().save(scope)

    def sync(self, world: World) -> None:
        super().sync(world)
        answers = self.values["place"].answers
        if world.size > 1 and answers.agree(self._job.collective):
            self._take_schedulers()
        answers.has_own = False

    def _take_schedulers(self) -> None:
        """Scripts may have stepped them by different numbers: on all workers they are as on rank 0.

        Raises:
            WorldBroken: nothing has changed.
        """
        own = {name: each for name, each in self.values.items() if isinstance(each, LRScheduler)}
        mine = pickle.dumps(({name: each.state_dict() for name, each in own.items()}, self.settings.dump()))
        states, settings = pickle.loads(self._job.collective.broadcast_bytes(mine, "elasticdl.schedulers"))
        if self._received is not None:
            values = {**self._received["values"], **states}
            self._received = {**self._received, "values": values, SCHEDULED: settings}
            return
        for name, sent in states.items():
            own[name].load_state_dict(sent)
        self.settings.load(settings)

    @property
    def origin(self) -> dict[str, Any]:
        if self.batches is None:
            return {}
        loader: Any = self.batches.loader
        samples = {"samples": len(loader.dataset)} if hasattr(loader.dataset, "__len__") else {}
        return {**samples, "batches": len(loader)}

    def restore(self) -> None:
        """After a torn step the script goes on with what it has, unless it begins the step again."""
        if self._kind.updates_within:
            self.go_back()

    @contextlib.contextmanager
    def as_one_pass(self, pieces: int) -> Iterator[Callable[[float], None]]:
        """Within, a batch is made again in so many pieces: its buffers move as by one pass.

        The function that it gives is called after each piece, with its part of the samples.
        """
        if pieces <= 1:
            yield lambda part: None
            return
        buffers, is_first = Buffers(self._modules()), True

        def made(part: float) -> None:
            nonlocal is_first
            buffers.add(part, is_first=is_first, alone=False)
            is_first = False
            buffers.reset()

        yield made
        buffers.update()

    def go_back(self) -> None:
        """To what was saved; what the script has done since has no effect."""
        self.reducer.drop_gradients()
        if not self.waits:
            super().restore()  # gradients that are part of the state come back

    @property
    def was_given_batches(self) -> bool:
        return self._was_given

    def begin_step(self) -> None:
        self._was_given = True
        self.reducer.open()
        self._step_begins()

    def sum(
        self,
        plan: StepPlan,
        objective: torch.Tensor | float,
        samples: int,
        rides: Mapping[str, npt.ArrayLike] = MappingProxyType({}),
    ) -> Sums:
        """Sum the gradients of the step of this ``plan`` over the workers, and what rides with them, by name.

        ``objective``: what this worker adds to the loss. ``samples``: this worker's, of ``plan.batch``. The step is everybody's with `agreed`.

        Raises:
            WorldBroken: the step is torn; gradients are gone.
        """
        for name, numbers in rides.items():
            self.reducer.ride(name, numbers)
        # The script has made a pass also where none of the samples is this worker's.
        mean = objective * (plan.batch / samples) if samples else 0.0
        self.reducer.add(mean, samples, weight=samples / plan.batch, is_first=self._job.world.rank == 0)
        self._job.advance(Activity.WAIT)
        batch, state = self._check.ballot(plan)
        return self.reducer.close(leaving=self._job.leaving, batch=batch, state=state)

    def agreed(self, sums: Sums) -> None:
        """These are the sums of the step that is to be made.

        Raises:
            RuntimeError, UserError, WorldBroken: the workers do not make the same step.
        """
        self._voted(sums.vote, sums.seconds)
