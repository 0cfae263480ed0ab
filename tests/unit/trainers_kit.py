"""What tests of Lightning's and Hugging Face's trainers share: workers in the threads of one process, each with a trainer of its own."""

from __future__ import annotations

import sys

import pytest
import torch
from job_kit import Job
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")

from lightning.pytorch.utilities.rank_zero import rank_zero_only  # noqa: E402

from elasticdl.elastic.core.plan import BatchPolicy  # noqa: E402
from elasticdl.elastic.lightning import strategy  # noqa: E402
from elasticdl.elastic.torch_kit.tensors import ElasticContext  # noqa: E402
from elasticdl.elastic.transformers import Trainer, elastic_trainer  # noqa: E402


@pytest.fixture(autouse=True)
def process_is_kept(monkeypatch):
    """What trainers change of their process is put back."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make_data(samples):
    pixels = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pixels, pixels[:, :3].argmax(1))


def loader_of(samples=50, batch_size=8, **options):
    return DataLoader(make_data(samples), batch_size=batch_size, **options)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.aside = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3), torch.nn.Linear(8, 1)

    def forward(self, pixels, labels=None):
        logits = self.last(self.first(pixels).tanh())
        aside = mse_loss(self.aside(pixels)[:, 0], labels.float())
        return {"loss": cross_entropy(logits, labels) + aside, "logits": logits}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, _):
        return self.net(*batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def changed(kind, **functions):
    """A kind with other functions."""
    return type(kind.__name__, (kind,), functions)


def sgd(*modules):
    return torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.1)


def leaves_out(chosen):
    """No gradients of these batches."""

    def training_step(self, batch, number):
        loss = Module.training_step(self, batch, number)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return None if chosen(self, number) else loss

    return changed(Module, training_step=training_step)


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


def make_strategy(job=None, *, takes_part_alone=True):
    made = strategy.make_strategy("lightning.pytorch", job or OwnJob())()
    made.takes_part_alone = takes_part_alone
    return made


def make_fit(kind, job, folder, *, batches=1, samples=24, epochs=1, callbacks=(), loader=None, **options):
    """In a step there are so many batches."""
    made, module = make_strategy(job), kind()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        strategy=made,
        accelerator="cpu",
        callbacks=[*callbacks],
        logger=False,
        accumulate_grad_batches=batches,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data = loader_of(samples) if loader is None else loader

    def fit():
        trainer.fit(module, data)
        return trainer, module.net

    return fit


def make_train(kind, job, folder, *, batches=1, samples=24, epochs=1, callbacks=(), data=None, **options):
    """The same with Hugging Face's trainer."""
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=batches,
        num_train_epochs=epochs,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        max_grad_norm=0.0,
        **{"optim": "sgd", "save_strategy": "no", **options},
    )
    rows = [{"pixels": pixels, "labels": label} for pixels, label in make_data(samples)]
    trainer = kind(
        model=Net(),
        args=args,
        train_dataset=rows if data is None else data,
        eval_dataset=rows[:8],
        callbacks=[*callbacks],
    )

    def train():
        trainer.train()
        return trainer, trainer.model

    return train


def run_trainers(kind, folder, monkeypatch, workers=2, callbacks=None, **options):
    """What each worker has to say, its trainer with the model that it ends with, and what is told to the journal."""
    job = Job(workers)
    job.keeps_states = False
    monkeypatch.setattr(elastic_trainer, "runtime", job)
    make = make_fit if issubclass(kind, Module) else make_train
    works = [
        make(kind, job, folder / str(rank), callbacks=callbacks(rank) if callbacks else (), **options)
        for rank in range(workers)
    ]
    said, made = job.run(lambda rank: works[rank]())
    return said, made, job.warnings


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run(kind, workers, ...)``: as `run_trainers`."""
    return lambda kind, *given, **options: run_trainers(kind, tmp_path, monkeypatch, *given, **options)
