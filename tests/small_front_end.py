"""The least that a front end takes: a trainer that stands for a library's, and what makes it elastic. docs/worker_side.md goes through it.

    python tests/small_front_end.py plain|elastic FOLDER

Adds a line to FOLDER/curve in each step, and writes all losses into FOLDER/end. While there is FOLDER/slow, a step takes longer.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.elastic.torch_kit.agreements import ScriptPosition
from elasticdl.elastic.torch_kit.loop_state import LoopState
from elasticdl.elastic.torch_kit.own_loader import OpenBatch, OwnLoader
from elasticdl.elastic.torch_kit.participant import MovableHost, Outcome, Participant, TrainerPlace
from elasticdl.elastic.torch_kit.refusals import require_plain
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.tensors import own as runtime

# -- the library --


class Trainer:
    """As a library has it: it knows nothing of other workers."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], epochs: int):
        self.model, self.optimizer, self.loader, self.epochs = model, optimizer, loader, epochs
        self.losses: list[float] = []  # a number of the trainer's own

    def train(self) -> None:
        for epoch in range(self.epochs):
            self.run_epoch(epoch)

    def run_epoch(self, epoch: int) -> None:
        for batch in self.loader:
            self.step(batch)

    def step(self, batch: Any) -> None:
        loss = self.loss_of(batch)
        loss.backward()
        self.update(float(loss.detach()))

    def loss_of(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return cross_entropy(self.model(inputs), labels)

    def update(self, loss: float) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss)

    def writes(self) -> bool:
        """Files, and to the screen."""
        return True


# -- the front end --


class Place(TrainerPlace):
    """The trainer's numbers, which change with the update alone."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    def read(self) -> dict[str, Any]:
        return {"losses": list(self._trainer.losses)}

    def apply(self, numbers: dict[str, Any]) -> None:
        self._trainer.losses = list(numbers["losses"])


class SmallHost(MovableHost):
    def __init__(self, trainer: Trainer, job: ElasticContext, on_left: Callable[[], None]) -> None:
        super().__init__(job, on_left, Place(trainer))
        self._trainer = trainer

    def begin(self, data: OwnLoader) -> None:
        position = ScriptPosition()
        values = {"place": position, "trainer": self._place}
        state = LoopState(self.job, self._trainer.model, self._trainer.optimizer, values, data)
        self.join(Participant(self.job, state, self, position, data))

    def make_gradients(self, sample: Any) -> float | None:
        """Of all workers; the mean loss over the global batch, or None if there is to be no update, as the others have made it."""
        participant = self.participant
        if participant.is_catching_up:  # the sample is a stand-in
            return None
        (given,), world = participant.open_batches, self.job.world
        given.noted = participant.state.attributes.note()
        loss = self._pass(given, sample, given.part.weight, last=True)
        if participant.settle() is not Outcome.MADE or participant.state.vote is None:
            return None
        is_whole = world.size == 1 and self.job.world is world  # else the world has broken since
        return float(loss.detach()) if is_whole else participant.state.vote.loss

    def remake(self, given: OpenBatch, sample: Any, weight: float) -> None:
        self._pass(given, sample, weight, last=False)

    def _pass(self, given: OpenBatch, sample: Any, weight: float, *, last: bool) -> torch.Tensor:
        with self.participant.apart(given.batch, b"forward"):
            loss = self._trainer.loss_of(sample)
        run = functools.partial(self._backward, loss)
        self.participant.backward(given, weight, loss, run, last=last)
        return loss

    @staticmethod
    def _backward(loss: torch.Tensor, factor: float) -> None:
        (loss if factor == 1.0 else loss * factor).backward()


class ElasticTrainer(Trainer):
    def train(self) -> None:
        require_plain(self.model, self.optimizer, "ElasticTrainer")
        data = OwnLoader(self.loader, "ElasticTrainer")
        self._host = SmallHost(self, runtime.init_in_place(data.size), runtime.leave)
        runtime.train_in_place(self._host.finish)
        self._host.begin(data)
        super().train()
        self._host.end_of_training()

    def run_epoch(self, epoch: int) -> None:
        if self._host.go_to(epoch) is not None:
            for sample in self._host.take():
                self.step(sample)

    def step(self, batch: Any) -> None:
        loss = self._host.make_gradients(batch)
        if loss is not None:
            self.update(loss)
            self._host.participant.close()

    def writes(self) -> bool:
        return self._host.is_first


# -- a script --


def make(kind: type[Trainer], epochs: int = 2, *, dropout: float = 0.0, shuffle: bool = True) -> Trainer:
    torch.manual_seed(0)
    inputs = torch.randn(50, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(dropout), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    return kind(model, optimizer, DataLoader(data, batch_size=8, shuffle=shuffle), epochs)


def main(kind: str, folder: str) -> None:
    base, curve, slow = {"plain": Trainer, "elastic": ElasticTrainer}[kind], Path(folder, "curve"), Path(folder, "slow")

    class Observed(base):  # type: ignore[misc, valid-type]
        def update(self, loss: float) -> None:
            super().update(loss)
            time.sleep(0.1 if slow.exists() else 0.0)
            if self.writes():
                with curve.open("a") as file:
                    file.write(f"{len(self.losses)} {loss}\n")

    trainer = make(Observed, epochs=50)
    trainer.train()
    if trainer.writes():
        Path(folder, "end").write_text("".join(f"{loss}\n" for loss in trainer.losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
