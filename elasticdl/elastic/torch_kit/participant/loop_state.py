"""What a `LoopParticipant` keeps: the training state, the batches that a script has in hand, and where the job stands in its script."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from elasticdl.elastic.core.progress import Progress, StepPlan
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.world import World
from elasticdl.elastic.torch.tape import Tape
from elasticdl.elastic.torch_kit.data.draws import Draws
from elasticdl.elastic.torch_kit.data.parts import Batches, GlobalBatch, Part, RandomStreams
from elasticdl.elastic.torch_kit.participant.answers import Answers
from elasticdl.elastic.torch_kit.pieces.kept import Noted
from elasticdl.elastic.torch_kit.pieces.optimizers import Optimizers
from elasticdl.elastic.torch_kit.pieces.torch_state import TorchState
from elasticdl.elastic.torch_kit.reduction.buffers import Buffers
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.elastic.training.pieces import OfElasticDL

PREPARED = "prepared_"  # begins the names of what `elastic.prepare` was given beside model, optimizer and loader


class LoopState(TorchState):
    """The training state of a script whose control flow goes on over changes of the world."""

    _leaves_absent_gradients = True
    _makes_one_pass = True
    _ends_with_function = False
    _remedy = "the workers' loops go different ways: they must call optimizer.step() after the same batches"

    def __init__(
        self,
        job: ElasticContext,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Optimizers,
        values: dict[str, Any],
        batches: Batches | None = None,
    ) -> None:
        super().__init__(job, model, cast(torch.optim.Optimizer, optimizer), None, values)
        self._was_given = False
        self.attributes.keeps_received = True
        self.was_loaded = False  # another worker's state has taken the place of this one's
        self.batches = batches  # of the script's loader, once they are known
        self.sources += [batches.source] if batches is not None else []
        self._received: dict[str, Any] | None = None  # of that what makes the model, while the script is on its way

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.was_loaded = True
        parts = [name for name in ("model", "optimizer", "outside") if name in state]
        self._received = {name: state[name] for name in parts} if self.attributes.is_on_its_way else None

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
        mine = pickle.dumps(({name: each.state_dict() for name, each in own.items()}, self._dump_settings()))
        states, settings = pickle.loads(self._job.collective.broadcast_bytes(mine, "elasticdl.schedulers"))
        for name, state in states.items():
            own[name].load_state_dict(state)
        self._load_settings(settings)

    @property
    def origin(self) -> dict[str, Any]:
        if self.batches is None:
            return {}
        loader: Any = self.batches.loader
        samples = {"samples": len(loader.dataset)} if hasattr(loader.dataset, "__len__") else {}
        return {**samples, "batches": len(loader)}

    def restore(self) -> None:
        """After a torn step the script goes on with what it has."""

    def _shown_name(self, name: str) -> str:
        return type(self.values[name]).__name__ if name.startswith(PREPARED) else name

    @contextlib.contextmanager
    def as_one_pass(self, pieces: int) -> Iterator[Callable[[int, float], None]]:
        """Within, a batch is made again in so many pieces: its buffers move as by one pass.

        The function that it gives is called after each piece, with its samples and its part of them all.
        """
        if pieces <= 1:
            yield lambda samples, part: None
            return
        buffers, total = Buffers(self._modules()), 0
        buffers.begin()

        def made(samples: int, part: float) -> None:
            nonlocal total
            buffers.add(part, is_first=not total, alone=False, samples=samples)
            total += samples
            buffers.reset()

        yield made
        buffers.close(None)
        buffers.update(total)

    def moved_by_passes(self) -> list[torch.Tensor]:
        """What `reset_buffers` puts back."""
        return self._reducer.moved()

    def reset_buffers(self) -> None:
        """They are as before the batches in hand."""
        self._reducer.reset_buffers()

    def go_back(self) -> None:
        """To what was saved; what the script has done since has no effect."""
        self._reducer.drop_gradients()
        if self._received is not None:
            self._load_own(self._received)
        super().restore()  # gradients that are part of the state come back

    @property
    def was_given_batches(self) -> bool:
        return self._was_given

    def arrive(self) -> None:
        """The script stands where the job stands."""
        self.go_back()
        self._received = None
        self.attributes.arrive()

    def begin_step(self) -> None:
        self._was_given = True
        self._check.begin(self.progress)
        self._reducer.begin_counting()

    def drop_gradients(self) -> None:
        self._reducer.drop_gradients()

    def reduce(self, plan: StepPlan, objective: torch.Tensor, samples: int) -> None:
        """``objective``: what this worker adds to the loss. ``samples``: this worker's, of ``plan.batch``.

        Raises:
            WorldBroken: the step is torn; gradients are gone.
        """
        self._job.begin(plan)
        share = samples / plan.batch
        # The script has made a pass also where none of the samples is this worker's.
        loss = objective * (plan.batch / samples) if samples else torch.zeros(())
        is_first = self._job.world.rank == 0
        self._reducer.add(loss, samples, weight=share, is_first=is_first, passes=len(plan.micro_batches))
        self._reducer.cast_vote(
            leaving=self._job.leaving, batch=self._batch_check.ballot(plan), state=self._check.ballot()
        )
        self._job.advance(Activity.WAIT)
        vote = self._reducer.reduce()
        self._voted(vote, self._reducer.passes.seconds)


@dataclass(slots=True)
class OpenBatch:
    """A batch that the script has been given, and what it has made of it."""

    batch: GlobalBatch
    part: Part
    sample: Any
    tape: Tape
    loss: torch.Tensor | None = None  # of backward(), if it was called once
    backwards: int = 0
    most: int = 0  # samples of a part when it was given, which are those that a pass is made of
    noted: Noted | None = None  # in attributes, before the script has made anything of it
    remade: dict[int, float] = field(default_factory=dict)  # numbers made again, weighed, by the ids of the script's
    objective: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  # sum of the losses of backward(), weighed

    def weighed(self, value: Any, own: float) -> float:
        """What this worker adds to the mean over the batch of a value, ``own`` over its part."""
        # It may have been made again, of another part than the script has seen.
        return self.remade.get(id(value), own * self.part.weight) if self.part.weight else 0.0

    def forget(self) -> None:
        """Its step is made: what the script has computed of it may go."""
        if not self.remade:  # whose ids are those of tensors that the tape keeps
            self.sample, self.tape = None, Tape(None)


def plan_of(open_batches: Sequence[OpenBatch], progress: Progress) -> StepPlan:
    """The step on these batches."""
    last = open_batches[-1].batch
    total = sum(len(given.batch.indices) for given in open_batches)
    after = Progress(last.epoch, last.end, progress.step + 1, progress.samples + total)
    indices = tuple(given.part.numbers for given in open_batches)
    whole = (
        last.indices if len(open_batches) == 1 else [index for given in open_batches for index in given.batch.indices]
    )
    return StepPlan(open_batches[0].batch.epoch, progress.step + 1, total, after, indices, last.is_last, whole)


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a script is in its loops, in batches and in samples of the epoch."""

    epoch: int
    batches: int
    samples: int

    @classmethod
    def behind(cls, batch: GlobalBatch) -> Standing:
        return cls(batch.epoch + 1, 0, 0) if batch.is_last else cls(batch.epoch, batch.number + 1, batch.end)


@dataclass(frozen=True, slots=True)
class EpochBegin:
    """What the order of an epoch is drawn from: the global random streams, and what `Draws` captures."""

    epoch: int
    streams: bytes
    draws: bytes


class ScriptPosition(OfElasticDL):
    """Where the job stands in its script, beside `Progress`; travels with the training state."""

    def __init__(self, began_with: tuple[int, float] = (0, 0.0)) -> None:
        """``began_with``: of the optimizers, as the script has given them."""
        self.began_with = began_with
        self.streams: dict[int, bytes] = {}  # of an epoch, the random streams with which it begins
        self.draws: dict[int, bytes] = {}  # of an epoch, what else its order is drawn from
        self.answers = Answers()

    def note_streams(self, epoch: int, draws: Draws, *, since: int) -> None:
        """This epoch begins with the present streams. Those before ``since`` are not needed any more."""
        self.streams = {**_from(since, self.streams), epoch: RandomStreams.capture()}
        self.draws = {**_from(since, self.draws), epoch: draws.capture()}

    def begin_of(self, epoch: int) -> EpochBegin | None:
        """As the others had it, if that is known."""
        if epoch not in self.streams or epoch not in self.draws:
            return None
        return EpochBegin(epoch, self.streams[epoch], self.draws[epoch])

    def put_back(self, epoch: int, draws: Draws) -> None:
        """Where this is known, the order of this epoch is drawn from here on as the others have drawn it."""
        if epoch in self.streams:
            RandomStreams.restore(self.streams[epoch])
        if epoch in self.draws:
            draws.restore(self.draws[epoch])

    def compared(self) -> dict[str, Any]:
        """The random streams with which the present epoch began, as the script knows them."""
        return RandomStreams.compared(self.streams[max(self.streams)]) if self.streams else {}

    def state_dict(self) -> dict[str, Any]:
        kept = {"streams": dict(self.streams), "draws": dict(self.draws), "answers": self.answers.state_dict()}
        return {**kept, "began_with": self.began_with}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.streams, self.draws = dict(state["streams"]), dict(state["draws"])
        self.answers.load_state_dict(state["answers"])
        self.began_with = state.get("began_with", self.began_with)


def _from(since: int, kept: dict[int, bytes]) -> dict[int, bytes]:
    return {epoch: each for epoch, each in kept.items() if epoch >= since}
