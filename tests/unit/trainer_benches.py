"""Benches of Lightning's trainer and of Hugging Face's, and what else their tests share."""

from __future__ import annotations

import sys
import tempfile
from contextlib import suppress

import lightning.pytorch as lightning
import torch
import transformers
from elastic_kit import make_data
from front_ends import BATCH
from job_kit import Job
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from loop_benches import Loop, changed, refused
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.lightning import strategy
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.transformers import Trainer, elastic_trainer


class TrainersJob(Job):
    """What trainers change of their process is put back."""

    def run(self, work):
        kept = rank_zero_only.rank, sys.excepthook
        try:
            return super().run(work)
        finally:
            rank_zero_only.rank, sys.excepthook = kept


def make_strategy(job, *, takes_part_alone=True):
    made = strategy.make_strategy("lightning.pytorch", job)()
    made.takes_part_alone = takes_part_alone
    return made


def lightning_trainer(made, **options):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(strategy=made, accelerator="cpu", **{**quiet, **options})


def arguments(folder, **options):
    """Hugging Face's."""
    given = {
        "per_device_train_batch_size": BATCH,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **{**given, **options})


class Fitted(lightning.LightningModule):
    """Of the class's ``bench``: what a module keeps in an attribute would be looked at in each step."""

    def __init__(self):
        super().__init__()
        self.model = self.bench.model

    def training_step(self, batch, number):
        loss = cross_entropy(self.model(batch[0]), batch[1])
        if self.bench.script.notes:
            self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, number):
        if self.bench.script.notes:
            self.bench.note(float(self.trainer.callback_metrics["loss"]))
        self.bench.draw()

    def configure_optimizers(self):
        return self.bench.optimizer


class Lightning(Loop):
    Job, module, hears_of_all = TrainersJob, Fitted, True

    def alone(self):
        self.fit("auto")

    def train(self, job):
        self.fit(make_strategy(job))

    def fit(self, made):
        lightning_trainer(made, max_epochs=self.script.epochs).fit(changed(self.module, bench=self)(), self.loader)


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


class PastTheSum(ByHand):
    def training_step(self, batch, number):
        cross_entropy(self.model(batch[0]), batch[1]).backward()
        self.optimizers()[0].step()


A_SUM = "the loss is a sum over the samples"
BY_HAND = changed(LightningByHand, module=PastTheSum)
Lightning.refusals = (refused(changed(Lightning, module=OfASum), A_SUM),)
LightningByHand.refusals = (refused(BY_HAND, r"this worker's part alone: call self.manual_backward\(loss\)"),)


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
            sampling = "random" if self.script.shuffle else "sequential"
            args = arguments(folder, num_train_epochs=self.script.epochs, train_sampling_strategy=sampling)
            trainer = noting(kind)(
                model=self.model_kind(self.model),
                args=args,
                train_dataset=[{"pixels": pixels, "labels": label} for pixels, label in self.data],
                optimizers=(self.optimizer, None),
            )
            trainer.bench = self
            trainer.train()


HuggingFace.refusals = (refused(changed(HuggingFace, model_kind=changed(WithLoss, reduction="sum")), A_SUM),)


# -- trainers of any module, model and data --


def loader_of(samples=50, batch_size=BATCH, **options):
    return DataLoader(make_data(samples), batch_size=batch_size, **options)


class NetWithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.aside = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3), torch.nn.Linear(8, 1)

    def forward(self, pixels, labels=None):
        logits = self.last(self.first(pixels).tanh())
        aside = mse_loss(self.aside(pixels)[:, 0], labels.float())
        return {"loss": cross_entropy(logits, labels) + aside, "logits": logits}


class LossModule(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = NetWithLoss()

    def training_step(self, batch, _):
        return self.net(*batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class LoggingModule(LossModule):
    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss


def sgd(*modules):
    return torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.1)


def leaves_out(chosen):
    """No gradients of these batches."""

    def training_step(self, batch, number):
        loss = LossModule.training_step(self, batch, number)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return None if chosen(self, number) else loss

    return changed(LossModule, training_step=training_step)


def skips(chosen):
    """The same."""

    def training_step(self, model, inputs, *args):
        skipped = self.state.global_step == 1 and chosen(inputs["labels"])
        return torch.tensor(0.0) if skipped else Trainer.training_step(self, model, inputs, *args)

    return changed(Trainer, training_step=training_step)


class OwnJob:
    """In place of what knows this process's job: one of it alone, as often as one likes."""

    def init_in_place(self, global_batch_size):
        return ElasticContext.connect(BatchPolicy(global_batch_size, None), seed=0, environ={})

    def train_in_place(self, finish):
        self.finish = finish

    def leave(self): ...

    def rank(self):
        return 0


def make_fit(kind, job, folder, *, batches=1, samples=24, epochs=1, callbacks=(), loader=None, **options):
    """In a step there are so many batches."""
    given = {"max_epochs": epochs, "callbacks": [*callbacks], "accumulate_grad_batches": batches, **options}
    module, trainer = kind(), lightning_trainer(make_strategy(job), **given)
    data = loader_of(samples) if loader is None else loader

    def fit():
        trainer.fit(module, data)
        return trainer, module.net

    return fit


def make_train(kind, job, folder, *, batches=1, samples=24, epochs=1, callbacks=(), data=None, **options):
    """The same with Hugging Face's trainer."""
    given = {"num_train_epochs": epochs, "gradient_accumulation_steps": batches, "learning_rate": 0.1, "optim": "sgd"}
    args = arguments(folder, **{**given, "train_sampling_strategy": "sequential", **options})
    rows = [{"pixels": pixels, "labels": label} for pixels, label in make_data(samples)]
    data = rows if data is None else data
    trainer = kind(model=NetWithLoss(), args=args, train_dataset=data, eval_dataset=rows[:8], callbacks=[*callbacks])

    def train():
        trainer.train()
        return trainer, trainer.model

    return train


def run_trainers(kind, folder, monkeypatch, workers=2, callbacks=lambda rank: (), **options):
    """What each worker has to say, its trainer with the model that it ends with, and what is told to the journal."""
    job = TrainersJob(workers)
    job.keeps_states = False
    monkeypatch.setattr(elastic_trainer, "runtime", job)
    make = make_fit if issubclass(kind, LossModule) else make_train
    works = [make(kind, job, folder / str(rank), callbacks=callbacks(rank), **options) for rank in range(workers)]
    said, made = job.run(lambda rank: works[rank]())
    return said, made, job.warnings
