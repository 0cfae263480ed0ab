"""What differs between the workers of Lightning's and Hugging Face's trainers is named, or mended if it is no more than rounding."""

import re
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from trainers_kit import JobOfThreads, make_data

lightning = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")

from lightning.pytorch.utilities.rank_zero import rank_zero_only  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from elasticdl.elastic.lightning import strategy  # noqa: E402
from elasticdl.elastic.transformers import Trainer, elastic_trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3  # of an epoch


@pytest.fixture(autouse=True)
def _kept(monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3)

    def forward(self, pixels, labels=None):
        logits = self.last(self.norm(self.first(pixels)).tanh())
        return {"loss": cross_entropy(logits, labels), "logits": logits}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, _):
        return self.net(*batch)["loss"]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Lightnings(lightning.Callback):
    """``plant`` is done after the first step of the second epoch."""

    def __init__(self, plant):
        self.plant, self.wait = plant, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 0):
            optimizer, scheduler = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
            self.plant(module.net, optimizer, scheduler, self)

    def state_dict(self):
        return {"wait": self.wait}


class HuggingFaces(transformers.TrainerCallback, ExportableState):
    """The same."""

    def __init__(self, plant):
        self.plant, self.wait, self.optimizer, self.scheduler = plant, 0, None, None

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        if state.global_step == STEPS + 1:
            state.best_metric = 0.2 if self.plant is best_metric else None
            self.plant(model, getattr(optimizer, "optimizer", optimizer), lr_scheduler, self)

    def state(self):
        return {"args": {}, "attributes": {"wait": self.wait}}


def fit(rank, job, plant, folder):
    made = strategy.make_strategy("lightning.pytorch", job)()
    made.takes_part_alone = True
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=3,
        strategy=made,
        accelerator="cpu",
        callbacks=[Lightnings(plant)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )

    def run():
        trainer.fit(module, DataLoader(make_data(24), batch_size=8))
        return module.net

    return run


def train(rank, job, plant, folder):
    args = transformers.TrainingArguments(
        output_dir=str(folder / str(rank)),
        per_device_train_batch_size=8,
        num_train_epochs=3,
        learning_rate=0.1,
        optim="sgd",
        train_sampling_strategy="sequential",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    rows = [{"pixels": pixels, "labels": label} for pixels, label in make_data(24)]
    model = Net()
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=[HuggingFaces(plant)])

    def run():
        trainer.train()
        return model

    return run


def rate(model, optimizer, scheduler, callback):
    optimizer.param_groups[0]["lr"] = 0.5


def scheduler(model, optimizer, scheduler, callback):
    scheduler._step_count += 1


def weight(model, optimizer, scheduler, callback):
    with torch.no_grad():
        model.first.weight *= 1.01


def statistic(model, optimizer, scheduler, callback):
    model.norm.running_mean += 1.0


def rounding(model, optimizer, scheduler, callback):
    with torch.no_grad():
        model.first.weight.copy_(torch.nextafter(model.first.weight, torch.tensor(9.0)))


def wait(model, optimizer, scheduler, callback):
    callback.wait = 7


def best_metric(model, optimizer, scheduler, callback): ...


def nothing(model, optimizer, scheduler, callback): ...


TRAINERS = pytest.mark.parametrize("trains", [fit, train])


def run(trains, plant, folder, monkeypatch):
    job = JobOfThreads(2)
    monkeypatch.setattr(elastic_trainer, "runtime", job)
    made = [trains(rank, job, plant if rank else nothing, folder) for rank in range(2)]
    said, models = job.run(lambda rank: made[rank]())
    # The random streams of the two threads are those of one process, and may differ as well.
    told = [re.sub(r"random\.[^;:]*(; )?", "", line).replace("; :", ":") for line in job.told]
    return said, models, [line for line in told if not re.match(r"after step \d+ :", line)]


@TRAINERS
@pytest.mark.parametrize(
    ("plant", "step", "named"),
    [
        (rate, STEPS + 1, "optimizer.param_groups.0.lr is 0."),
        (scheduler, 2 * STEPS, "scheduler._step_count is "),
        (weight, 2 * STEPS, "first.weight differs by 0.0"),
        (statistic, 2 * STEPS, "norm.running_mean differs by"),
    ],
)
def test_what_makes_two_models_ends_the_job(tmp_path, monkeypatch, trains, plant, step, named):
    said, _, told = run(trains, plant, tmp_path, monkeypatch)
    (line,) = set(map(str, said))
    assert line.startswith(f"after step {step} worker 0 and worker 1 hold different states: "), line
    assert named in line
    assert told == []


@TRAINERS
@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (wait, "callbacks.{}.wait is 0 on worker 0 and 7 on worker 1"),
        (best_metric, "trainer.best_metric is None on worker 0 and 0.2 on worker 1"),
    ],
)
def test_what_does_not_is_told_once(tmp_path, monkeypatch, trains, plant, named):
    if trains is fit and plant is best_metric:
        pytest.skip("Lightning's trainer has none")
    said, _, told = run(trains, plant, tmp_path, monkeypatch)
    assert said == (None, None)
    (line,) = told
    assert line.startswith(
        f"after step {2 * STEPS} {named.format('Lightnings' if trains is fit else 'HuggingFaces')}: "
    )


@TRAINERS
def test_one_unit_in_the_last_place_is_mended_and_told_once(tmp_path, monkeypatch, trains):
    said, (first, second), told = run(trains, rounding, tmp_path, monkeypatch)
    assert said == (None, None)
    (line,) = told
    assert line.startswith(f"after step {2 * STEPS} the workers' states were not the same")
    assert "all have taken rank 0's" in line
    for mine, theirs in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
