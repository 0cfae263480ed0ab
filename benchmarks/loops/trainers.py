"""Lightning and Hugging Face's Trainer, as people write them: alone, elastic, or with DistributedDataParallel on Gloo."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from benchmarks.loops.plain import team_of_torch
from benchmarks.loops.records import Team, Work, run, team_of_job
from benchmarks.models import worker_batch
from benchmarks.torch_models import make_dataset, make_model, make_optimizer, warm_up

FOR_EVER = 10**6  # epochs


def _size(work: Work) -> int:
    """Processes that a trainer knows of."""
    return int(os.environ["WORLD_SIZE"]) if work.way == "ddp" else 1


def _team(work: Work) -> Team:
    if work.way == "elastic":
        from elasticdl.elastic.torch import context

        return team_of_job(context)
    return team_of_torch() if work.way == "ddp" else Team()


def _is_over(work: Work, number: int) -> bool:
    """Tell that a step was made; whether it was the last."""
    record = work.record
    if record.team is None:  # a job has its place once training has begun
        record.begin(_team(work))
    record.lap("step")
    record.made(number)
    return record.over()


def _prepare(work: Work) -> None:
    torch.set_num_threads(1)
    if work.record.warm:
        warm_up(work.model)
    if work.way == "elastic":
        work.record.watch_checks()


def lightning(work: Work) -> None:
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
            if _is_over(work, trainer.global_step):
                trainer.should_stop = True

    strategy: Any = "auto"
    if work.way == "ddp":
        strategy = L.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
    elif work.way == "elastic":
        import elasticdl.elastic.lightning  # noqa: F401

        strategy = "elastic"
    _prepare(work)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=_size(work),
        max_epochs=FOR_EVER,
        callbacks=[Steps()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch = work.workers * worker_batch(work.model) // _size(work)
    trainer.fit(Module(), DataLoader(make_dataset(work.model, work.samples), batch_size=batch, shuffle=True))


class WithLoss(torch.nn.Module):
    """As models of transformers' are called, and what they return."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = make_model(name)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def transformers(work: Work) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if _is_over(work, state.global_step):
                control.should_training_stop = True

    if work.way == "elastic":
        from elasticdl.elastic.transformers import Trainer
    _prepare(work)
    model = WithLoss(work.model)
    Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(work.folder / "transformers"),
            per_device_train_batch_size=work.workers * worker_batch(work.model) // _size(work),
            num_train_epochs=FOR_EVER,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo" if work.way == "ddp" else None,
        ),
        train_dataset=make_dataset(work.model, work.samples),
        data_collator=_collate,
        optimizers=(make_optimizer(model), None),
        callbacks=[Steps()],
    ).train()


def _collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


if __name__ == "__main__":
    run({"lightning": lightning, "transformers": transformers})
    if dist.is_initialized():  # whose threads, left alone, now and then end the process by an abort
        dist.destroy_process_group()
