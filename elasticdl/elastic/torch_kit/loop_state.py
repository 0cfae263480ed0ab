"""The training state of a script whose control flow goes on over changes of the world."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import numpy.typing as npt
import torch
from torch.optim.lr_scheduler import LRScheduler

from elasticdl.elastic.core.plan import StepPlan
from elasticdl.elastic.core.protocol import World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.torch_kit.buffers import Buffers
from elasticdl.elastic.torch_kit.gradients import Remedy
from elasticdl.elastic.torch_kit.own_loader import OwnLoader
from elasticdl.elastic.torch_kit.reducer import Sums
from elasticdl.elastic.torch_kit.refusals import Optimizers
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_state import TorchState


class LoopState(TorchState):
    """The training state of a script whose control flow goes on over changes of the world."""

    _leaves_absent_gradients = True
    _begins_steps_itself = True
    _ends_with_function = False
    _remedy = "the workers' loops go different ways: they must call optimizer.step() after the same batches"

    def __init__(
        self,
        job: ElasticContext,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
        values: dict[str, Any],
        batches: OwnLoader | None = None,
        remedy: Remedy | None = None,
    ) -> None:
        super().__init__(job, model, cast(torch.optim.Optimizer, optimizer), None, values, remedy=remedy)
        self._was_given = False
        self.attributes.keeps_received = True
        self.was_loaded = False  # another worker's state has taken the place of this one's
        self.batches = batches  # of the script's loader, once they are known
        self.sources += [batches.source] if batches is not None else []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.was_loaded = True
        is_kept = self._begins_again  # by copies
        for piece in self._trained:
            piece.undo_to(state.get(piece.name) if self.attributes.is_on_its_way and not is_kept else None)

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
        for name, state in states.items():
            own[name].load_state_dict(state)
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
        if self._begins_again:
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
        super().restore()  # gradients that are part of the state come back

    @property
    def was_given_batches(self) -> bool:
        return self._was_given

    def arrive(self) -> None:
        """The script stands where the job stands."""
        self.go_back()
        for piece in self._trained:
            piece.undo_to(None)
        self.attributes.arrive()

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
        return self.reducer.close(
            leaving=self._job.leaving, batch=self._batch_check.ballot(plan), state=self._check.ballot()
        )

    def agreed(self, sums: Sums) -> None:
        """These are the sums of the step that is to be made.

        Raises:
            RuntimeError, UserError, WorldBroken: the workers do not make the same step.
        """
        self._voted(sums.vote, sums.seconds)
