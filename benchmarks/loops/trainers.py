"""A plain loop, Lightning and Hugging Face's Trainer on one model and one data set: alone, elastic, or with DDP.

Each calls what `begin` returns after each step, with the step's number; where that returns True training ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.torch_models import make_dataset, make_model, make_optimizer

ALONE, ELASTIC, DDP = "alone", "elastic", "ddp"
FOR_EVER = 10**6  # epochs
# By which a library takes itself to be one of several processes.
OF_SEVERAL = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Team:
    """What a loop knows of the other workers. ``agree``: rank 0's number, on all."""

    agree: Callable[[int], int]
    rank: Callable[[], int]
    world: Callable[[], tuple[str, int]]  # its name and its size


OnStep = Callable[[int], bool]
Begin = Callable[[Team], OnStep]


@dataclass(frozen=True, slots=True)
class Work:
    """``batch``: the global one; with DDP each of the processes makes a part of it."""

    model: str
    samples: int
    batch: int
    folder: Path


def _alone() -> Team:
    return Team(lambda number: number, lambda: 0, lambda: ("1", 1))


def _of_ddp() -> Team:
    def agree(number: int) -> int:
        told = torch.tensor([number])
        dist.broadcast(told, 0)
        return int(told)

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Team(agree, lambda: rank, lambda: ("1", size))


def _of_job(job: Callable[[], Any]) -> Team:
    def agree(number: int) -> int:
        return int(job().collective.broadcast_bytes(str(number).encode(), "benchmark.steps"))

    return Team(agree, lambda: int(job().rank), lambda: (str(job().world.version), int(job().size)))


def _team(way: str) -> Team:
    if way == ELASTIC:
        from elasticdl.elastic.torch import context

        return _of_job(context)
    return _of_ddp() if way == DDP else _alone()


def loop(way: str, work: Work, begin: Begin) -> None:
    """`benchmarks.torch_models` in the loop of every tutorial."""
    model: Any = make_model(work.model)
    optimizer: Any = make_optimizer(model)
    dataset = make_dataset(work.model, work.samples)
    if way == DDP:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        size = dist.get_world_size()
        loader: Any = DataLoader(dataset, batch_size=work.batch // size, sampler=DistributedSampler(dataset))
    else:
        loader = DataLoader(dataset, batch_size=work.batch, shuffle=True)
    passes_by: Callable[[], bool] = bool
    if way == ELASTIC:
        import elasticdl.elastic.torch as elastic

        model, optimizer, loader = elastic.prepare(model, optimizer, loader)
        passes_by = elastic.catching_up
    on_step, number = begin(_team(way)), 0
    for _ in count():
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            number += 1
            if not passes_by() and on_step(number):
                return


def lightning(way: str, work: Work, begin: Begin) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(work.model)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            images, labels = batch
            return cross_entropy(self.model(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.model)

    class Steps(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if on_step(trainer.global_step):
                trainer.should_stop = True

    strategy: Any = "auto"
    if way == DDP:
        strategy = L.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
    elif way == ELASTIC:
        import elasticdl.elastic.lightning  # noqa: F401

        strategy = "elastic"
    devices = int(os.environ["WORLD_SIZE"]) if way == DDP else 1
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=FOR_EVER,
        callbacks=[Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    on_step = begin(_team(way))
    data = make_dataset(work.model, work.samples)
    trainer.fit(Module(), DataLoader(data, batch_size=work.batch // devices, shuffle=True))


class WithLoss(torch.nn.Module):
    """As models of transformers' are called, and what they return."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = make_model(name)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def transformers(way: str, work: Work, begin: Begin) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if on_step(state.global_step):
                control.should_training_stop = True

    if way == ELASTIC:
        from elasticdl.elastic.transformers import Trainer
    size = int(os.environ["WORLD_SIZE"]) if way == DDP else 1
    model = WithLoss(work.model)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(work.folder / "transformers"),
            per_device_train_batch_size=work.batch // size,
            num_train_epochs=FOR_EVER,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo" if way == DDP else None,
        ),
        train_dataset=make_dataset(work.model, work.samples),
        data_collator=_collate,
        optimizers=(make_optimizer(model), None),
        callbacks=[Steps()],
    )
    # A job has its place once training has begun.
    on_step: OnStep = _late(lambda: begin(_team(way)))
    trainer.train()


def _late(make: Callable[[], OnStep]) -> OnStep:
    made: list[OnStep] = []

    def on_step(number: int) -> bool:
        if not made:
            made.append(make())
        return made[0](number)

    return on_step


def _collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {
        "images": torch.stack([image for image, _ in samples]),
        "labels": torch.stack([label for _, label in samples]),
    }


TRAINERS = {"loop": loop, "lightning": lightning, "transformers": transformers}


def prepare_environment(way: str) -> None:
    """Before the trainer's package is imported."""
    torch.set_num_threads(1)
    if way != DDP:
        for name in OF_SEVERAL:
            os.environ.pop(name, None)
