"""The training state of a script whose control flow goes on over changes of the world: what another worker has sent waits in it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
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
from elasticdl.elastic.torch_kit.own_loader import OwnLoader
from elasticdl.elastic.torch_kit.passes import Buffers, Remedy
from elasticdl.elastic.torch_kit.reducer import Sums
from elasticdl.elastic.torch_kit.refusals import Optimizers
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_state import TorchState
from elasticdl.elastic.training.kept_state import REMEDY
from elasticdl.elastic.training.pieces import Piece, load_all

SCHEDULED = "scheduled"  # in a state that was sent: settings that rank 0's schedulers have made since


class LoopState(TorchState):
    """The training state of a script whose control flow goes on over changes of the world.

    What another worker has sent waits here until the script stands where the job stands. Only then it takes effect, so that nothing is lost by
    what the script does on its way; others are sent it as it came.
    """

    _remedy = "the workers' loops go different ways: they must call optimizer.step() after the same batches"
    _ends_with_function = False

    def __init__(
        self,
        job: ElasticContext,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
        values: dict[str, Any],
        batches: OwnLoader | None = None,
        remedy: Remedy | None = None,
        *,
        updates_within: bool = False,
    ) -> None:
        super().__init__(
            job,
            model,
            cast(torch.optim.Optimizer, optimizer),
            None,
            values,
            remedy=remedy,
            updates_within=updates_within,
        )
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
        place = self.values["place"]
        if world.size > 1 and place.agree(self._job.collective):
            self._take_schedulers()
        place.answers.has_own = False

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
        if self._updates_within:
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
            UserError, WorldBroken: the workers do not make the same step.
        """
        self._voted(sums.vote, sums.seconds)
