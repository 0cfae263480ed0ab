"""The strategy for Lightning in a world of one: to the bit Lightning's own; a newcomer goes on from any batch."""

import csv
import pickle
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

lightning = pytest.importorskip("lightning.pytorch")

from lightning.fabric import Fabric  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402
from lightning.pytorch.utilities.data import has_len_all_ranks  # noqa: E402
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # noqa: E402

from elasticdl.common.errors import UserError  # noqa: E402
from elasticdl.elastic.core import protocol as p  # noqa: E402
from elasticdl.elastic.core.interruptions import WorldBroken  # noqa: E402
from elasticdl.elastic.core.plan import BatchPolicy  # noqa: E402
from elasticdl.elastic.core.step_times import Activity  # noqa: E402
from elasticdl.elastic.lightning import requirements, strategy  # noqa: E402
from elasticdl.elastic.lightning.decisions import Decisions  # noqa: E402
from elasticdl.elastic.lightning.fit_host import FitHost  # noqa: E402
from elasticdl.elastic.lightning.train_loader import TrainLoader  # noqa: E402
from elasticdl.elastic.lightning.writing import Writing  # noqa: E402
from elasticdl.elastic.torch_kit.participant.agreements import Agreements  # noqa: E402
from elasticdl.elastic.torch_kit.participant.host import Outcome  # noqa: E402
from elasticdl.elastic.torch_kit.participant.participant import Participant  # noqa: E402
from elasticdl.elastic.torch_kit.participant.script_position import ScriptPosition  # noqa: E402
from elasticdl.elastic.torch_kit.torch_job import ElasticContext  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _keep_ranks(monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


class OwnJob:
    """A job of this process, as often as one likes."""

    def init_in_place(self, global_batch_size):
        return ElasticContext.connect(BatchPolicy(global_batch_size, None), seed=0, environ={})

    def train_in_place(self, finish):
        self.finish = finish

    def leave(self): ...


def make_strategy(job=None):
    made = strategy.make_strategy("lightning.pytorch", job or OwnJob())()
    made.takes_part_alone = True
    return made


class Module(lightning.LightningModule):
    def __init__(self, plateau=False, skips=False):
        super().__init__()
        self.plateau, self.skips = plateau, skips
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
        )
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        self.seen.append((self.current_epoch, batch_idx, self.global_step, loss.item()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("count", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        return None if self.skips and batch_idx % 3 == 1 else loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.plateau:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]


class ManualModule(Module):
    """Two optimizers, of which one accumulates over two batches."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.1)
        first.step()
        self.untoggle_optimizer(first)
        again = cross_entropy(self.layers(batch[0]), batch[1])
        with second.toggle_model():
            self.manual_backward(again / 2)
        if batch_idx % 2:
            second.step()
            second.zero_grad()
        for schedule in self.lr_schedulers():
            schedule.step()
        self.seen.append((self.current_epoch, batch_idx, self.global_step, loss.item(), again.item()))
        self.log_dict({"loss": loss, "again": again}, on_step=True, on_epoch=True)

    def configure_optimizers(self):
        first = torch.optim.Adam(self.layers[:2].parameters(), lr=0.01)
        second = torch.optim.SGD(self.layers[2:].parameters(), lr=0.1, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(each, 2, 0.9) for each in (first, second)]


def make_data(samples=50):
    pixels = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pixels, pixels[:, :3].argmax(1))


def fit(folder, made, *, module=None, loader=None, ckpt_path=None, schedule=None, **options):
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
    if loader is None:
        train = DataLoader(make_data(), batch_size=8, shuffle=True)
    else:
        train = loader() if callable(loader) else loader
    trainer.fit(module, train, DataLoader(make_data(20), batch_size=10), ckpt_path=ckpt_path)
    return trainer, module


def result_of(folder, trainer, module):
    with (folder / "log" / "metrics.csv").open() as file:
        log = [{key: row[key] for key in sorted(row)} for row in csv.DictReader(file)]
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    weights = {key: value.tolist() for key, value in module.state_dict().items()}
    files = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return module.seen, trainer.global_step, trainer.current_epoch, log, rates, files, weights


class OwnOrder(torch.utils.data.Sampler):
    """Draws from a generator and from what it has drawn before."""

    def __init__(self):
        self.generator, self.order = np.random.default_rng(5), list(range(50))

    def __len__(self):
        return 50

    def __iter__(self):
        self.generator.shuffle(self.order)
        return iter(list(self.order))


FEATURES = {
    "plain": {},
    "an order of its own": {
        "loader": lambda: DataLoader(make_data(), batch_size=8, sampler=OwnOrder()),
        "max_epochs": 2,
    },
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
    assert result_of(tmp_path / "ours", *fit(tmp_path / "ours", make_strategy(), **FEATURES[feature])) == theirs


@pytest.mark.parametrize(
    "feature",
    [
        *("plain", "accumulate", "validate within an epoch", "steps", "an order of its own"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("plateau", "manual")),
    ],
)
def test_a_newcomer_goes_on_from_any_batch(tmp_path, monkeypatch, feature):
    states = []
    commit, join = Participant.commit, Participant.join

    def commit_and_keep(self, epoch):
        states.append(pickle.dumps(self.state.state_dict()))
        return commit(self, epoch)

    monkeypatch.setattr(Participant, "commit", commit_and_keep)
    whole = fit(tmp_path / "whole", make_strategy(), **FEATURES[feature])
    seen, *_, rates, _, weights = result_of(tmp_path / "whole", *whole)
    monkeypatch.setattr(Participant, "commit", commit)
    metrics = {key: float(value) for key, value in whole[0].callback_metrics.items()}
    for number, state in enumerate(states):

        def join_from(self, state=state):
            join(self)
            self.state.load_state_dict(pickle.loads(state))
            for part in (p.SaveScope.WITH_PARAMETERS, p.SaveScope.AT_COMMIT):
                self.state.save(part)
            self.is_catching_up = True

        monkeypatch.setattr(Participant, "join", join_from)
        folder = tmp_path / str(number)
        trainer, module = fit(folder, make_strategy(), **FEATURES[feature])
        first = number * FEATURES[feature].get("accumulate_grad_batches", 1)
        per_epoch = 7
        if "accumulate_grad_batches" in FEATURES[feature]:
            first = number // 3 * per_epoch + number % 3 * 3
        assert module.seen == seen[first:], f"from batch {number}"
        assert (trainer.global_step, trainer.current_epoch) == (whole[0].global_step, whole[0].current_epoch)
        assert [group["lr"] for group in trainer.optimizers[0].param_groups] == rates, f"from batch {number}"
        assert {key: value.tolist() for key, value in module.state_dict().items()} == weights, f"from batch {number}"
        # The newcomer's sums over an epoch begin with those of the others.
        assert {key: float(value) for key, value in trainer.callback_metrics.items()} == pytest.approx(metrics), number


def test_a_newcomer_knows_which_step_was_saved_last(tmp_path):
    """Between two batches of a step it is asked whether to save again, by all who have not saved."""
    (whole, _), (other, _) = (
        fit(tmp_path / str(batches), make_strategy(), max_epochs=1, limit_train_batches=batches) for batches in (4, 2)
    )
    states = [each.strategy._host.trainer_state for each in (whole, other)]
    states[1].load(states[0].take(at_batch=True))
    states[1].arrive()
    assert other.checkpoint_callback._last_global_step_saved == whole.checkpoint_callback._last_global_step_saved == 4


def test_the_global_batch_is_told(tmp_path):
    trainer, _ = fit(tmp_path, make_strategy(), max_epochs=1, limit_train_batches=2, accumulate_grad_batches=2)
    assert trainer.strategy._host.job.policy.batch_size(1) == 16


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class NormModule(Module):
    def __init__(self):
        super().__init__()
        self.layers[1] = torch.nn.SyncBatchNorm(16)


class QuasiNewtonModule(Module):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class StillModule(Module):
    def configure_optimizers(self): ...


@pytest.mark.parametrize(
    ("module", "loader", "options", "words"),
    [
        (StillModule, None, {}, "configure_optimizers returns no optimizer"),
        (NormModule, None, {}, "layers.1 is a SyncBatchNorm"),
        (QuasiNewtonModule, None, {}, "LBFGS evaluates its closure several times"),
        (Module, None, {"devices": 2}, "devices=2; expected one"),
        (Module, None, {"num_nodes": 2}, "num_nodes=2; leave it out"),
        (Module, None, {"sync_batchnorm": True}, "sync_batchnorm=True needs a process group"),
        pytest.param(
            Module,
            None,
            {"val_check_interval": {"minutes": 1}},
            "val_check_interval is a time",
            marks=pytest.mark.skipif(lightning.__version__ < "2.6", reason="Lightning 2.5 has no such thing"),
        ),
        (Module, DataLoader(Endless()), {}, "what is only iterated over can't be divided"),
        (
            Module,
            DataLoader(make_data(), sampler=DistributedSampler(make_data(), 2, 0)),
            {},
            "the train loader has a DistributedSampler",
        ),
        (Module, [DataLoader(make_data()), DataLoader(make_data())], {}, "there are several train loaders"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_what_cant_be_had_is_refused_in_one_line(tmp_path, module, loader, options, words, alone):
    made = make_strategy()
    made.takes_part_alone = not alone
    trainer = lightning.Trainer(
        strategy=made, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options
    )
    with pytest.raises(UserError, match=words) as refused:
        trainer.fit(module(), DataLoader(make_data(), batch_size=8) if loader is None else loader)
    assert str(refused.value).startswith(requirements.WHO)
    assert "\n" not in str(refused.value)


class BesideModule(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        torch.autograd.backward(0.1 * self.layers(batch[0]).square().mean())
        return loss


def test_gradients_that_training_step_makes_beside_its_loss_are_cleared_by_lightning_or_refused(tmp_path):
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    data = DataLoader(make_data(), batch_size=8)
    trainer = lightning.Trainer(strategy=make_strategy(), max_epochs=1, **options)
    trainer.fit(BesideModule(), data)
    trainer = lightning.Trainer(strategy=make_strategy(), accumulate_grad_batches=2, **options)
    with pytest.raises(UserError, match="otherwise than by the loss of training_step") as refused:
        trainer.fit(BesideModule(), data)
    assert "\n" not in str(refused.value)


class SumModule(Module):
    def training_step(self, batch, batch_idx):
        return {"loss": cross_entropy(self.layers(batch[0]), batch[1], reduction="sum")}


class ManualSumModule(ManualModule):
    def training_step(self, batch, batch_idx):
        self.manual_backward(cross_entropy(self.layers(batch[0]), batch[1], reduction="sum"))


@pytest.mark.parametrize("kind", [SumModule, ManualSumModule])
def test_a_loss_that_is_a_sum_is_one_line(tmp_path, kind):
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(strategy=make_strategy(), **options)
    with pytest.raises(UserError, match="the loss is a sum over the samples") as refused:
        trainer.fit(kind(), DataLoader(make_data(), batch_size=8))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("alone", [True, False])
def test_a_tuner_tunes_alone_and_is_refused_in_one_line_otherwise(tmp_path, alone):
    class Sized(Module):
        batch_size = 4

        def train_dataloader(self):
            return DataLoader(make_data(), batch_size=self.batch_size, shuffle=True)

        def val_dataloader(self):
            return DataLoader(make_data(20), batch_size=self.batch_size)

    made = make_strategy()
    made.takes_part_alone = not alone
    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        strategy=made,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        max_epochs=1,
    )
    tuner, module = Tuner(trainer), Sized()
    if alone:
        found = tuner.scale_batch_size(module, init_val=8, max_trials=2)
        assert found == module.batch_size == (16 if lightning.__version__ >= "2.6" else 32)  # 2.5 goes one too far
        return
    for tune, callback in ((tuner.scale_batch_size, "BatchSizeFinder"), (tuner.lr_find, "LearningRateFinder")):
        with pytest.raises(UserError, match=f"{callback} trains several times") as refused:
            tune(module)
        assert "\n" not in str(refused.value)


def test_a_callback_that_exchanges_schedulers_is_refused_where_workers_may_come_later():
    class OneSchedule(Module):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit_with(made):
        trainer = lightning.Trainer(
            strategy=made,
            accelerator="cpu",
            callbacks=[StochasticWeightAveraging(0.1)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            max_epochs=1,
        )
        trainer.fit(OneSchedule(), DataLoader(make_data(), batch_size=8))

    with pytest.raises(UserError, match="StochasticWeightAveraging exchanges the scheduler") as refused:
        fit_with(make_strategy())
    assert "\n" not in str(refused.value)
    alone = make_strategy()
    alone.takes_part_alone = False
    fit_with(alone)


def test_who_comes_in_the_middle_of_a_torn_step_does_not_ask_what_the_others_have_decided():
    """They wait for its gradients, and not for another decision."""
    asked = []

    def broadcast_bytes(value, name):
        asked.append(name)
        return value

    said = []
    job = SimpleNamespace(
        size=2,
        world=SimpleNamespace(version=3),
        advance=said.append,
        collective=SimpleNamespace(broadcast_bytes=broadcast_bytes),
    )
    decisions = Decisions(job)
    decisions.participant = participant_of(job, open_batches=["a batch"])
    for known in ("first", None):
        decisions.participant.position.answers.add(known)
    assert [decisions.of_first(number) for number in range(3)] == ["first", None, 2]
    assert len(asked) == 1
    decisions.participant.open_batches.clear()
    decisions.of_first("between two steps")
    assert len(asked) == 2
    assert said == [Activity.WAIT, Activity.UPDATE] * 2  # who goes on to write a checkpoint does not wait


def participant_of(job, **values):
    """With open batches what workers say is part of the step; see `Agreements.ask`."""
    participant = Participant.__new__(Participant)
    state = SimpleNamespace(begin_launched=lambda: None)
    of_nothing = {"state": state, "open_batches": [], "is_catching_up": False, "is_reduced": False, "is_torn": False}
    vars(participant).update({"job": job, "position": ScriptPosition(), **of_nothing, **values})
    participant.agreements = Agreements(participant, participant.position.answers)
    return participant


class Wishes:
    """A collective of two workers, of which the other wishes this."""

    def __init__(self, *answers):
        self.answers = list(answers)

    def sum_asked(self, tensor, what):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        tensor += answer


def deciding(wishes, **values):
    world = SimpleNamespace(version=3)
    job = SimpleNamespace(size=2, world=world, advance=lambda _: None, collective=wishes, is_told_to_leave=False)
    decisions = Decisions(job)
    decisions.participant = participant_of(job, **values)
    return decisions


def test_what_any_worker_wishes_all_do_and_who_is_on_its_way_wishes_nothing():
    decisions = deciding(Wishes(0, 1, 0, WorldBroken("a worker is gone")))
    assert [decisions.anybody(wish) for wish in (False, False, True, True, True)] == [False, True, True, None, None]
    decisions._job.world.version = 4
    decisions._job.collective.answers = [0]
    assert decisions.anybody(True) is True
    decisions._job.collective.answers, decisions._job.is_told_to_leave = [0], True
    assert decisions.anybody(True) is False
    assert deciding(Wishes(), is_catching_up=True).anybody(True) is False
    later = deciding(Wishes(0), open_batches=["a batch"])
    later.participant.position.answers.add(False)
    assert [later.anybody(True), later.anybody(True)] == [False, True]  # the others have gone on there


@pytest.mark.parametrize(("answers", "stops_after"), [([False, True], 2), ([None, None, True], 3)])
def test_a_wish_to_stop_is_everybodys_before_the_next_batch(tmp_path, monkeypatch, answers, stops_after):
    asked = []

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 0  # which the others have not heard when the answer is None

    def anybody(self, wish):
        asked.append(wish)
        return answers[len(asked) - 1] if len(asked) <= len(answers) else wish

    monkeypatch.setattr(Decisions, "anybody", anybody)
    made = make_strategy()
    trainer = lightning.Trainer(
        strategy=made, accelerator="cpu", logger=False, max_epochs=2, callbacks=[Stop()], default_root_dir=tmp_path
    )
    trainer.fit(Module(), DataLoader(make_data(), batch_size=8))
    assert trainer.global_step == stops_after
    assert asked[:stops_after] == [True, *([answers[0] is None] * (stops_after - 1))]
    assert "on_advance_end" not in vars(trainer.fit_loop) | vars(trainer.fit_loop.epoch_loop)


@pytest.mark.parametrize(("own", "others", "steps"), [(True, False, 4), (False, True, 4), (False, False, 14)])
def test_any_workers_hook_leaves_out_the_rest_of_an_epoch_for_all(tmp_path, monkeypatch, own, others, steps):
    class Leaves(Module):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if own and batch_idx == 2 else None

    def anybody(self, wish):
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        return wish or (others and (progress.ready, progress.processed) == (3, 2))

    monkeypatch.setattr(Decisions, "anybody", anybody)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 2}
    trainer = lightning.Trainer(strategy=make_strategy(), accelerator="cpu", **options)
    module = Leaves()
    trainer.fit(module, DataLoader(make_data(), batch_size=8), DataLoader(make_data(20), batch_size=10))
    assert trainer.global_step == steps
    assert "on_train_batch_start" not in vars(module)


def test_hooks_of_a_batch_draw_the_scripts_random_numbers(tmp_path, monkeypatch):
    """And neither what loads the batch nor the training step does, if there are several workers."""

    def fit_with(made):
        lightning.seed_everything(3)
        drawn = []

        class Drawing(Module):
            def on_after_batch_transfer(self, batch, dataloader_idx):
                batch[0].add_(torch.rand(()))
                return batch

            def on_train_batch_start(self, batch, batch_idx):
                drawn.append(torch.rand(()).item())
                return -1 if batch_idx == 3 else None

            def training_step(self, batch, batch_idx):
                torch.rand(5)
                return super().training_step(batch, batch_idx)

        trainer = lightning.Trainer(
            strategy=made,
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(Drawing(), DataLoader(make_data(), batch_size=8, shuffle=True))
        return drawn

    def loading(self, batch):
        self.window.open(lambda: torch.manual_seed(seeds[0]))
        return nullcontext()

    monkeypatch.setattr(FitHost, "loading", loading)
    drawn = []
    for rank in (0, 1):
        seeds = [5 + rank]
        drawn.append(fit_with(make_strategy()))
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 8


def test_a_world_that_breaks_while_something_is_said_is_warned_of_once():
    def broadcast_bytes(value, name):
        raise WorldBroken("a worker is lost")

    warnings = []
    job = SimpleNamespace(
        size=2,
        world=SimpleNamespace(version=3),
        advance=lambda waiting: None,
        warn=warnings.append,
        collective=SimpleNamespace(broadcast_bytes=broadcast_bytes),
    )
    decisions = Decisions(job)
    decisions.participant = participant_of(job)
    assert [decisions.of_first(number) for number in range(3)] == [0, 1, 2]
    assert warnings == ["a decision is each worker's own: a worker is lost"]
    job.world.version = 4
    decisions.of_first(0)
    assert len(warnings) == 2


def test_an_iterator_that_is_not_used_draws_what_torchs_draws():
    """Lightning 2.5.0 asks for one and then for another where it resumes."""

    class FirstEpoch:
        def begin_epoch(self, batches):
            self.batches = batches
            return 0

        @property
        def participant(self):
            (batch,) = self.batches.order_of(0)
            return SimpleNamespace(batches=lambda number: self.batches.load([batch.plan(1).whole_run(0)], 0))

    for workers in (0, 1):
        seen = []
        for wrap in (lambda loader: loader, lambda loader: TrainLoader(loader, FirstEpoch(), "test")):
            torch.manual_seed(3)
            loader = wrap(DataLoader(range(30), batch_size=30, shuffle=True, num_workers=workers))
            iter(loader)
            seen += [next(iter(loader)).tolist()]
        assert seen[0] == seen[1]


def test_a_scheduler_that_is_exchanged_is_one_line(tmp_path):
    class Exchanges(lightning.Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.lr_scheduler_configs[0].scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizers[0])

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 2}
    trainer = lightning.Trainer(strategy=make_strategy(), accelerator="cpu", callbacks=[Exchanges()], **options)
    with pytest.raises(UserError, match="a callback has exchanged a scheduler") as refused:
        trainer.fit(Module(), DataLoader(make_data(), batch_size=8), DataLoader(make_data(20), batch_size=10))
    assert "\n" not in str(refused.value)


def test_it_is_found_by_its_name():
    import elasticdl.elastic.lightning as ours

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(strategy="elastic", accelerator="cpu", logger=False)
    assert isinstance(trainer.strategy, ours.ElasticStrategy)
    assert trainer.is_global_zero
    assert has_len_all_ranks(DataLoader(make_data()), trainer.strategy)  # before there is a module
    assert isinstance(pickle.loads(pickle.dumps(trainer)).strategy, ours.ElasticStrategy)


def test_fabric_is_told_that_the_strategy_is_the_trainers():
    import elasticdl.elastic.lightning  # noqa: F401

    with pytest.raises(UserError, match="this strategy is for Lightning's Trainer") as refused:
        Fabric(strategy="elastic", accelerator="cpu", devices=1)
    assert "\n" not in str(refused.value)


def test_the_other_package_has_it_too(tmp_path):
    other = pytest.importorskip("pytorch_lightning")
    made = strategy.make_strategy("pytorch_lightning", OwnJob())()
    made.takes_part_alone = True

    class OtherModule(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 3)

        def training_step(self, batch):
            return cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = other.Trainer(
        strategy=made,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(OtherModule(), DataLoader(make_data(), batch_size=8))
    assert trainer.global_step == 7


def test_a_worker_whose_step_the_others_have_made_takes_their_state(tmp_path, monkeypatch):
    """It has lost the connection when the gradients had arrived everywhere else."""
    states = []
    commit, settle = Participant.commit, Participant.settle

    def commit_and_keep(self, epoch):
        states.append(pickle.dumps(self.state.state_dict()))
        return commit(self, epoch)

    monkeypatch.setattr(Participant, "commit", commit_and_keep)
    whole = fit(tmp_path / "whole", make_strategy())
    monkeypatch.setattr(Participant, "commit", commit)
    made = []

    def settle_or_lose(self, failure=None):
        if not self.is_reduced and not self.is_catching_up:
            made.append(self.state.step)
            if len(made) == 5:
                self.state.load_state_dict(pickle.loads(states[5]))
                for part in (p.SaveScope.WITH_PARAMETERS, p.SaveScope.AT_COMMIT):
                    self.state.save(part)
                self.is_catching_up = True
                self.open_batches.clear()
                return Outcome.BEHIND
        return settle(self, failure)

    monkeypatch.setattr(Participant, "settle", settle_or_lose)
    lost = fit(tmp_path / "lost", make_strategy())
    theirs, ours = result_of(tmp_path / "whole", *whole), result_of(tmp_path / "lost", *lost)
    assert ours[0] == theirs[0]
    assert ours[1:3] == theirs[1:3]
    assert ours[4:] == theirs[4:]
    metrics = {key: float(value) for key, value in whole[0].callback_metrics.items()}
    assert {key: float(value) for key, value in lost[0].callback_metrics.items()} == pytest.approx(metrics)


def test_a_closure_that_is_evaluated_again_is_refused_where_there_are_others():
    """As sharpness-aware minimization does: the second gradients would be each worker's own."""
    taking_part = FitHost.__new__(FitHost)
    taking_part._given, taking_part._manual = object(), None
    taking_part._joined, taking_part.job = SimpleNamespace(is_reduced=True), SimpleNamespace(size=2)
    with pytest.raises(UserError, match="sharpness-aware minimization"):
        taking_part.backward(torch.ones(()), torch.ones(()), lambda loss: None)


def test_a_csv_logger_of_another_rank_0_keeps_what_the_last_one_has_written(tmp_path):
    trainer = SimpleNamespace(loggers=[CSVLogger(tmp_path, name="", version="log")], progress_bar_callback=None)
    for loss in (1.0, 2.0, 3.0):
        logger = CSVLogger(tmp_path, name="", version="log")
        trainer.loggers = [logger]
        Writing(trainer, SimpleNamespace(rank=None)).take_rank(0, is_first=False)
        logger.log_metrics({"loss": loss}, step=1)
        logger.save()
    names = ("metrics_0.csv", "metrics_1.csv", "metrics.csv")
    assert [(tmp_path / "log" / name).read_text().split()[1] for name in names] == ["1.0,1", "2.0,1", "3.0,1"]
