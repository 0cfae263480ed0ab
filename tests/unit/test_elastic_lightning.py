"""The strategy for Lightning in a world of one: to the bit Lightning's own; a newcomer goes on from any batch."""

import ast
import csv
import functools
import importlib
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from elastic_lightning_kit import ManualModule, Module, lightning, loader_of, make_strategy, trainer_with
from front_end_kit import OwnJob, be_behind, come_later, keep_states
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from trainers_kit import make_data, process_is_kept  # noqa: F401

from elasticdl.elastic.lightning import inside, strategy
from elasticdl.elastic.lightning.fit_host import Writing
from elasticdl.elastic.torch_kit.participant import Participant

pytestmark = pytest.mark.filterwarnings("ignore")


def fit(folder, made, *, module=None, loader=None, schedule=None, **options):
    lightning.seed_everything(3)
    module = ManualModule() if module == "manual" else Module(**(module or {}))
    trainer = lightning.Trainer(
        strategy=made,
        accelerator="cpu",
        logger=CSVLogger(folder, name="", version="log"),
        callbacks=[
            ModelCheckpoint(folder / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping("val_loss", patience=5),
            *([GradientAccumulationScheduler(schedule)] if schedule else []),
        ],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, **options},
    )
    train = loader() if loader else loader_of(shuffle=True)
    trainer.fit(module, train, DataLoader(make_data(20), batch_size=10))
    return trainer, module


def result_of(folder, trainer, module):
    with (folder / "log" / "metrics.csv").open() as file:
        log = [{key: row[key] for key in sorted(row)} for row in csv.DictReader(file)]
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    weights = {key: value.tolist() for key, value in module.state_dict().items()}
    files = sorted(path.name for path in folder.glob("checkpoints/*"))
    return module.seen, trainer.global_step, trainer.current_epoch, log, rates, files, weights


class OwnOrder(torch.utils.data.Sampler):
    """Draws from a generator, and counts."""

    def __init__(self):
        self.generator, self.drawn = np.random.default_rng(5), 0

    def __len__(self):
        return 50

    def __iter__(self):
        self.drawn += 1
        return iter(np.roll(self.generator.permutation(50), self.drawn).tolist())


FEATURES = {
    "plain": {},
    "an order of its own": {"loader": lambda: loader_of(sampler=OwnOrder()), "max_epochs": 2},
    "accumulate": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    "validate within an epoch": {"val_check_interval": 2, "max_epochs": 2},
    "steps": {"max_steps": 10, "max_epochs": -1},
    "limited": {"limit_train_batches": 4},
    "bf16": {"precision": "bf16-mixed", "max_epochs": 2},
    "double": {"precision": "64-true", "max_epochs": 2},
    "a loader for each epoch": {"reload_dataloaders_every_n_epochs": 1},
    "accumulation by a schedule": {"schedule": {0: 1, 1: 3}},
    "plateau": {"module": {"plateau": True}},
    "steps that are skipped": {"module": {"skips": True}},
    "manual": {"module": "manual"},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_in_a_world_of_one_it_is_lightnings_own_to_the_bit(tmp_path, feature):
    theirs = result_of(tmp_path / "theirs", *fit(tmp_path / "theirs", "auto", **FEATURES[feature]))
    trainer, module = fit(tmp_path / "ours", make_strategy(), **FEATURES[feature])
    assert result_of(tmp_path / "ours", trainer, module) == theirs
    assert trainer.strategy._host.job.policy.batch_size(1) == 8 * FEATURES[feature].get("accumulate_grad_batches", 1)


def metrics_of(trainer):
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    "feature",
    [
        *("plain", "accumulate", "validate within an epoch", "steps", "an order of its own"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("plateau", "manual")),
    ],
)
def test_a_newcomer_goes_on_from_any_batch(tmp_path, monkeypatch, feature):
    options = FEATURES[feature]
    (whole, module), states = keep_states(monkeypatch, lambda: fit(tmp_path / "whole", make_strategy(), **options))
    seen, steps, epoch, _, rates, _, weights = result_of(tmp_path / "whole", whole, module)
    for number, state in enumerate(states):
        folder = tmp_path / str(number)
        late = functools.partial(fit, folder, make_strategy(), **options)
        trainer, module = come_later(monkeypatch, state, late)
        first = number // 3 * 7 + number % 3 * 3 if feature == "accumulate" else number
        found = result_of(folder, trainer, module)
        assert found[0] == seen[first:], f"from batch {number}"
        assert (*found[1:3], found[4], found[6]) == (steps, epoch, rates, weights), f"from batch {number}"
        # The newcomer's sums over an epoch begin with those of the others.
        assert metrics_of(trainer) == pytest.approx(metrics_of(whole)), f"from batch {number}"


def test_a_newcomer_knows_which_step_was_saved_last(tmp_path):
    """Between two batches of a step it is asked whether to save again, by all who have not saved."""
    (whole, _), (other, _) = (
        fit(tmp_path / str(batches), make_strategy(), max_epochs=1, limit_train_batches=batches) for batches in (4, 2)
    )
    states = [each.strategy._host._place for each in (whole, other)]
    states[0].note(0, 3)
    states[1].load(states[0].dump())
    states[1].arrive()
    assert other.checkpoint_callback._last_global_step_saved == whole.checkpoint_callback._last_global_step_saved == 4


def test_the_other_package_has_it_too():
    other = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.demos.boring_classes import BoringModel

    made = strategy.make_strategy("pytorch_lightning", OwnJob())()
    made.takes_part_alone = True
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = other.Trainer(strategy=made, accelerator="cpu", max_steps=7, limit_val_batches=0, **quiet)
    trainer.fit(BoringModel())
    assert trainer.global_step == 7


def test_who_is_behind_in_a_step_has_the_others_sums_over_the_epoch(tmp_path, monkeypatch):
    (whole, _), states = keep_states(monkeypatch, lambda: fit(tmp_path / "whole", make_strategy()))
    lost, _ = be_behind(monkeypatch, 5, states[5], lambda: fit(tmp_path / "lost", make_strategy()))
    assert metrics_of(lost) == pytest.approx(metrics_of(whole))


def test_who_is_behind_in_the_last_step_ends_where_the_others_have_ended(tmp_path, monkeypatch):
    def train(steps):
        torch.manual_seed(3)
        trainer, module = trainer_with(max_epochs=3, max_steps=steps), Module()
        trainer.fit(module, loader_of(shuffle=True))
        return trainer, module

    whole, module = train(4)
    state = pickle.dumps(whole.strategy._host.participant.state.state_dict())
    behind, other = be_behind(monkeypatch, 4, state, lambda: train(-1))  # it would go on
    assert behind.global_step == 4
    for mine, its in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, its)


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


def test_hooks_of_a_batch_draw_the_scripts_random_numbers(monkeypatch):
    """And neither what loads the batch nor the training step does, if there are several workers."""
    drawn = {0: [], 1: []}

    class Drawing(Module):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            batch[0].add_(torch.rand(()))
            return batch

        def on_train_batch_start(self, batch, batch_idx):
            drawn[rank].append(torch.rand(()).item())
            return -1 if batch_idx == 3 else None

        def training_step(self, batch, batch_idx):
            torch.rand(5)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(Participant, "seed", lambda self, batch, purpose=b"": torch.manual_seed(5 + rank))
    for rank in drawn:  # noqa: B007 - which the functions above read
        lightning.seed_everything(3)
        trainer_with(max_epochs=2).fit(Drawing(), loader_of(shuffle=True))
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 8


def test_private_names_of_lightning_are_all_in_one_file():
    """What a release of Lightning may rename is to be found at once."""
    found = []
    for path in sorted(Path(inside.__file__).parent.glob("*.py")):
        if path.name == "inside.py":
            continue
        tree = ast.parse(path.read_text())
        own = {name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) for name in [each.name]}
        own |= {each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute) and is_of_self(each)}
        found += [
            f"{path.name}: {ast.unparse(each)}"
            for each in ast.walk(tree)
            if isinstance(each, ast.Attribute) and each.attr.startswith("_") and not each.attr.startswith("__")
            if not is_of_self(each) and each.attr not in own
        ]
    assert found == []


def is_of_self(node):
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_the_private_names_are_there():
    trainer, module = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), Module()
    trainer.strategy.connect(module)
    assert not [*inside.cant_be_had(trainer)]
    assert trainer.fit_loop.epoch_loop._results == {}
    assert inside.arguments_of_step(trainer, "batch", 3) == ("batch", 3)
    with inside.in_training_step(module):
        assert inside.is_in_training_step(module)
    assert [each == {} for each in inside._metrics_of(trainer)] == [True] * 3
    assert vars(trainer._logger_connector).keys() >= {"_current_fx", "_first_loop_iter"}
    loops = inside.loops_of(trainer.fit_loop)
    names = {type(each).__name__ for each in (*loops, *inside.counts_of(loops))}
    assert {"_FitLoop", "_TrainingEpochLoop", "_BatchProgress", "_ReadyCompletedTracker"} <= names
    assert callable(importlib.import_module("lightning.pytorch.loggers.utilities")._log_hyperparams)
    for callback in (ModelCheckpoint(),):
        assert all(any(name.startswith(each) for name in vars(callback)) for each in inside.OF_SAVED[:2])
