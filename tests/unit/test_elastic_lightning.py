"""Lightning's strategy in a world of one: to the bit Lightning's own, whatever the trainer is told; a newcomer goes on from any batch."""

import csv
import pickle
from types import SimpleNamespace

import lightning.pytorch as lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.data import has_len_all_ranks
from trainer_benches import LoggingModule, TrainersJob, lightning_trainer, loader_of, make_strategy

import elasticdl.elastic.lightning as elastic
from elasticdl.common.credentials import MASTER, PROCESS
from elasticdl.common.errors import UserError
from elasticdl.elastic.lightning import strategy
from elasticdl.elastic.lightning.fit_host import NOBODY, Writing

pytestmark = pytest.mark.filterwarnings("ignore")


class Scheduled(LoggingModule):
    def __init__(self, plateau=False, skips=False):
        super().__init__()
        self.plateau, self.skips, self.seen = plateau, skips, []
        self.net.last = torch.nn.Sequential(torch.nn.BatchNorm1d(16), self.net.last)

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.seen.append((self.current_epoch, number, self.global_step, loss.item()))
        return None if self.skips and number % 3 == 1 else loss

    def validation_step(self, batch, number):
        self.log("val_loss", self.net(*batch)["loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.plateau:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]


def fit(folder, made, *, module=None, loader=None, schedule=None, **options):
    lightning.seed_everything(3)
    module = Scheduled(**(module or {}))
    trainer = lightning_trainer(
        made,
        enable_checkpointing=True,
        logger=CSVLogger(folder, name="", version="log"),
        callbacks=[
            ModelCheckpoint(folder / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping("val_loss", patience=5),
            *([GradientAccumulationScheduler(schedule)] if schedule else []),
        ],
        log_every_n_steps=1,
        **{"max_epochs": 3, **options},
    )
    train = loader() if loader else loader_of(shuffle=True)
    trainer.fit(module, train, loader_of(20, 10))
    return trainer, module


def result_of(folder, trainer, module):
    with (folder / "log" / "metrics.csv").open() as file:
        log = [{key: row[key] for key in sorted(row)} for row in csv.DictReader(file)]
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    weights = {key: value.tolist() for key, value in module.state_dict().items()}
    files = sorted(path.name for path in folder.glob("checkpoints/*"))
    return module.seen, trainer.global_step, trainer.current_epoch, log, rates, files, weights


class RollingOrder(torch.utils.data.Sampler):
    """Draws from a generator, and counts."""

    def __init__(self):
        self.generator, self.drawn = np.random.default_rng(5), 0

    def __len__(self):
        return 50

    def __iter__(self):
        self.drawn += 1
        return iter(np.roll(self.generator.permutation(50), self.drawn).tolist())


FEATURES = {
    "an order of its own": {"loader": lambda: loader_of(sampler=RollingOrder()), "max_epochs": 2},
    "accumulate": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "validate within an epoch": {"val_check_interval": 2, "max_epochs": 2},
    "steps": {"max_steps": 10, "max_epochs": -1},
    "bf16": {"precision": "bf16-mixed", "max_epochs": 2},
    "a loader for each epoch": {"reload_dataloaders_every_n_epochs": 1},
    "accumulation by a schedule": {"schedule": {0: 1, 1: 3}},
    "plateau": {"module": {"plateau": True}},
    "steps that are skipped": {"module": {"skips": True}},
}


# With which a newcomer is tried.
JOINED = ("accumulate", "validate within an epoch", "an order of its own", "plateau")


def metrics_of(trainer):
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("feature", FEATURES)
def test_in_a_world_of_one_it_is_lightnings_own_to_the_bit_and_a_newcomer_goes_on_from_any_batch(tmp_path, feature):
    def train(job, folder):
        said, made = job.run(lambda _: fit(tmp_path / folder, make_strategy(job), **FEATURES[feature]))
        assert said == (None,)
        return made[0][0], result_of(tmp_path / folder, *made[0])

    theirs = result_of(tmp_path / "theirs", *fit(tmp_path / "theirs", "auto", **FEATURES[feature]))
    job = TrainersJob()
    whole, ours = train(job, "whole")
    assert ours == theirs
    seen, steps, epoch, _, rates, _, weights = ours
    in_epoch, batches = (3, 3) if feature == "accumulate" else (7, 1)
    for step, state in job.states.items() if feature in JOINED else ():
        if 0 < step < steps:
            place = divmod(step, in_epoch)
            trainer, found = train(TrainersJob(finds=state, place=place), str(step))
            made = seen[place[0] * 7 + place[1] * batches :]
            assert found[0][-len(made) :] == made, f"from step {step}"
            assert (*found[1:3], found[4], found[6]) == (steps, epoch, rates, weights), f"from step {step}"
            # The newcomer's sums over an epoch begin with those of the others.
            assert metrics_of(trainer) == pytest.approx(metrics_of(whole)), f"from step {step}"


def test_the_other_package_has_it_too():
    other = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.demos.boring_classes import BoringModel

    made = strategy.make_strategy("pytorch_lightning", job := TrainersJob())()
    made.takes_part_alone = True
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = other.Trainer(strategy=made, accelerator="cpu", max_steps=7, limit_val_batches=0, **quiet)
    job.run(lambda _: trainer.fit(BoringModel()))
    assert trainer.global_step == 7


def test_who_is_behind_in_a_step_has_the_others_sums_over_the_epoch(tmp_path):
    job = TrainersJob(2, {(1, 5): "behind"})
    job.keeps_states = False
    said, made = job.run(lambda rank: fit(tmp_path / str(rank), make_strategy(job), max_epochs=1))
    assert said == (None, None)
    ours, behind = (metrics_of(trainer) for trainer, _ in made)
    del ours["largest"], behind["largest"]  # each worker's own
    assert behind == pytest.approx(ours)


def test_a_csv_logger_of_another_rank_0_keeps_what_the_last_one_has_written(tmp_path):
    trainer = SimpleNamespace(progress_bar_callback=None)
    for loss in (1.0, 2.0, 3.0):
        logger = CSVLogger(tmp_path, name="", version="log")
        trainer.loggers = [logger]
        Writing(trainer, SimpleNamespace(rank=None)).take_rank(0, is_first=False)
        logger.log_metrics({"loss": loss}, step=1)
        logger.save()
    names = ("metrics_0.csv", "metrics_1.csv", "metrics.csv")
    assert [(tmp_path / "log" / name).read_text().split()[1] for name in names] == ["1.0,1", "2.0,1", "3.0,1"]


def test_a_worker_that_leaves_writes_no_more():
    writes = SimpleNamespace(rank=None)
    writing = Writing(SimpleNamespace(progress_bar_callback=None, loggers=[]), writes)
    writing.take_rank(0, is_first=False)
    assert writes.rank == 0
    writing.stop()
    assert (writing.rank, writes.rank) == (NOBODY, NOBODY)


def test_it_is_found_by_its_name():
    trainer = lightning.Trainer(strategy="elastic", accelerator="cpu", logger=False)
    assert isinstance(trainer.strategy, elastic.ElasticStrategy)
    assert trainer.is_global_zero
    assert has_len_all_ranks(loader_of(), trainer.strategy)  # before there is a module
    assert isinstance(pickle.loads(pickle.dumps(trainer)).strategy, elastic.ElasticStrategy)


def test_each_strategy_is_for_workers_of_its_own_kind(monkeypatch):
    monkeypatch.setenv(MASTER, "127.0.0.1:1")
    with pytest.raises(UserError, match="give `elasticdl run` --processes_per_worker, or take"):
        elastic.ElasticModelParallelStrategy()
    monkeypatch.setenv(PROCESS, "0")
    with pytest.raises(UserError, match="share one model: take ElasticModelParallelStrategy of"):
        elastic.ElasticStrategy()


def test_alone_the_strategy_of_a_shared_model_is_lightnings_own():
    made = elastic.ElasticModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    assert isinstance(made, lightning.strategies.ModelParallelStrategy)
    trainer = lightning.Trainer(strategy=made, accelerator="cpu", devices=1, logger=False)
    assert trainer.is_global_zero
    assert trainer.world_size == 1
    assert trainer.strategy.reduce_boolean_decision(True)
