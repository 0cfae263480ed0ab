"""Benches of Lightning's trainer and of Hugging Face's."""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress

import lightning.pytorch as lightning
import torch
import transformers
from front_ends import BATCH
from job_kit import Job
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from loop_benches import Loop, refused
from torch.nn.functional import cross_entropy

from elasticdl.elastic.lightning import strategy
from elasticdl.elastic.transformers import Trainer


class TrainersJob(Job):
    """What trainers change of their process is put back."""

    def run(self, work):
        kept = rank_zero_only.rank, sys.excepthook
        try:
            return super().run(work)
        finally:
            rank_zero_only.rank, sys.excepthook = kept


class Fitted(lightning.LightningModule):
    def __init__(self, bench):
        super().__init__()
        self.model, self.bench = bench.model, bench

    def training_step(self, batch, number):
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, number):
        self.bench.note(float(self.trainer.callback_metrics["loss"]))
        self.bench.draw()

    def configure_optimizers(self):
        return self.bench.optimizer


class Lightning(Loop):
    Job, module, hears_of_all = TrainersJob, Fitted, True

    def alone(self):
        self.fit("auto")

    def train(self, job):
        made = strategy.make_strategy("lightning.pytorch", job)()
        made.takes_part_alone = True
        self.fit(made)

    def fit(self, made):
        names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = lightning.Trainer(
            strategy=made, accelerator="cpu", max_epochs=self.script.epochs, **dict.fromkeys(names, False)
        )
        trainer.fit(self.module(self), self.loader)


class ByHand(Fitted):
    """Two optimizers, of which the second one accumulates over two batches, also beyond an epoch's end."""

    automatic_optimization = False

    def training_step(self, batch, number):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        self.manual_backward(super().training_step(batch, number))
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        with second.toggle_model(), suppress(Exception):  # a torn step is no error of the script's
            self.manual_backward(cross_entropy(self.model(batch[0]), batch[1]) / 2)
        if number % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self):
        return self.bench.optimizer, torch.optim.SGD(self.model.last.parameters(), lr=0.1)


class LightningByHand(Lightning):
    module = ByHand

    def __init__(self, script):
        super().__init__(script)
        self.optimizer = torch.optim.SGD(self.model.first.parameters(), lr=0.1, momentum=0.9)


class OfASum(Fitted):
    def training_step(self, batch, number):
        return cross_entropy(self.model(batch[0]), batch[1], reduction="sum")


class FitsASum(Lightning):
    module = OfASum


class PastTheSum(ByHand):
    def training_step(self, batch, number):
        cross_entropy(self.model(batch[0]), batch[1]).backward()
        self.optimizers()[0].step()


class FitsPastTheSum(LightningByHand):
    module = PastTheSum


Lightning.refusals = (refused(FitsASum, "the loss is a sum over the samples"),)
LightningByHand.refusals = (refused(FitsPastTheSum, r"this worker's part alone: call self.manual_backward\(loss\)"),)


class WithLoss(torch.nn.Module):
    """As Hugging Face's models are called."""

    reduction = "mean"

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixels, labels):
        logits = self.model(pixels)
        return {"loss": cross_entropy(logits, labels, reduction=self.reduction), "logits": logits}


def noting(kind):
    class Noting(kind):
        def log(self, logs, *args):
            super().log(logs, *args)
            self.bench.note(logs.get("loss"))  # there is none behind the last step

        def _maybe_log_save_evaluate(self, *args, **kwargs):  # after each step
            super()._maybe_log_save_evaluate(*args, **kwargs)
            self.bench.draw()

    return Noting


class HuggingFace(Loop):
    runtimes = ("elasticdl.elastic.transformers.elastic_trainer.runtime",)
    Job, model_kind, hears_of_all = TrainersJob, WithLoss, True

    def alone(self):
        self.fit(transformers.Trainer)

    def train(self, job):
        self.fit(Trainer)

    def fit(self, kind):
        with tempfile.TemporaryDirectory() as folder:
            args = transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=BATCH,
                num_train_epochs=self.script.epochs,
                lr_scheduler_type="constant",
                train_sampling_strategy="random" if self.script.shuffle else "sequential",
                max_grad_norm=0.0,
                logging_steps=1,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
            )
            trainer = noting(kind)(
                model=self.model_kind(self.model),
                args=args,
                train_dataset=[{"pixels": pixels, "labels": label} for pixels, label in self.data],
                optimizers=(self.optimizer, None),
            )
            trainer.bench = self
            trainer.train()


class SumLoss(WithLoss):
    reduction = "sum"


class TrainsASum(HuggingFace):
    model_kind = SumLoss


HuggingFace.refusals = (refused(TrainsASum, "the loss is a sum over the samples"),)
