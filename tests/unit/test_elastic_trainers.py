"""What differs between the workers of Lightning's and Hugging Face's trainers, and gradients and numbers that these trainers make of parts."""

import lightning.pytorch as lightning
import pytest
import torch
import torchmetrics
import transformers
from job_kit import Lost
from trainer_benches import LoggingModule, LossModule, changed, leaves_out, skips

from elasticdl.elastic.transformers import Trainer, elastic_trainer

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3  # of an epoch


# -- what a worker alone does: it makes two models, and ends the job; or it is told once --


class Lightnings(lightning.Callback):
    """``plant`` is done after the first step of the second epoch."""

    def __init__(self, plant):
        self.plant, self.wait = plant, 0

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == STEPS + 1:
            self.plant(self, module.net, trainer)

    def state_dict(self):
        return {"wait": self.wait}


class HuggingFaces(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    """The same."""

    def __init__(self, plant):
        self.plant, self.wait = plant, 0

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step == STEPS + 1:
            self.plant(self, model, state)

    def state(self):
        return {"args": {}, "attributes": {"wait": self.wait}}


def momentum_and_schedule(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


Fitted = changed(LossModule, configure_optimizers=momentum_and_schedule)


def rate(callback, model, trainer):
    trainer.optimizers[0].param_groups[0]["lr"] = 0.5


def weight(callback, model, trainer):
    model.first.weight.data *= 1.01


def wait(callback, model, trainer):
    callback.wait = 7


def best_metric(callback, model, state):
    state.best_metric = 0.2


@pytest.mark.parametrize(
    ("kind", "plant", "step", "ends", "named"),
    [  # from which step on it is seen, whether it ends the job, and what is named
        (Fitted, rate, STEPS + 1, True, "optimizer.param_groups.0.lr is 0."),
        (Fitted, wait, 2 * STEPS, False, "callbacks.Lightnings.wait is 0 on worker 0 and 7 on worker 1: "),
        (Trainer, weight, 2 * STEPS, True, "first.weight differs by 0.0"),
        (Trainer, best_metric, 2 * STEPS, False, "trainer.best_metric is None on worker 0 and 0.2 on worker 1: "),
    ],
)
def test_what_makes_two_models_ends_the_job_and_what_does_not_is_told_once(
    run_trainers, kind, plant, step, ends, named
):
    callback = Lightnings if kind is Fitted else HuggingFaces
    callbacks = [[callback(lambda *_: None)], [callback(plant)]]
    said, _, told = run_trainers(kind, callbacks=callbacks.__getitem__, epochs=3)
    if ends:
        (line,) = set(map(str, said))
        assert line.startswith(f"after step {step} worker 0 and worker 1 hold different states: ")
        assert named in line
        assert told == []
    else:
        assert said == (None, None)
        (line,) = told
        assert line.startswith(f"after step {step} {named}")


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("kind", [leaves_out(lambda module, number: number == 2), skips(lambda labels: True)])
def test_a_batch_that_all_workers_leave_out_has_no_gradients(run_trainers, kind, batches):
    options = {"batches": batches, "samples": 64 if issubclass(kind, LossModule) else 40}
    _, ((alone, expected),), _ = run_trainers(kind, 1, **options)
    said, made, _ = run_trainers(kind, **options)
    assert said == (None, None)
    for trainer, net in made:
        torch.testing.assert_close([*net.parameters()], [*expected.parameters()], rtol=1e-4, atol=1e-6)
        assert logged_by(trainer) == pytest.approx(logged_by(alone), rel=1e-5)


# -- what trainers log --


def logged_by(trainer):
    """By name, or by the place in the history of Hugging Face's."""
    if isinstance(trainer, lightning.Trainer):
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
    rows = enumerate(trainer.state.log_history)
    return {(at, name): row[name] for at, row in rows for name in ("loss", "eval_loss") if name in row}


def test_what_is_logged_is_of_the_global_batch_but_for_the_largest(run_trainers):
    """Which is each worker's own, and is named once."""
    _, ((alone, _),), told = run_trainers(LoggingModule, 1)
    expected = logged_by(alone)
    assert expected["samples"] == 24
    assert not told
    said, made, told = run_trainers(LoggingModule, 3)
    assert said == (None,) * 3
    logged = [logged_by(trainer) for trainer, _ in made]
    assert max(each["largest"] for each in logged) == expected["largest"]
    for each in logged:
        assert {**each, "largest": expected["largest"]} == pytest.approx(expected, rel=1e-5)
    assert sum("the largest or smallest 'largest' is that of each worker's part" in line for line in told) == 3


class TwoPasses(Trainer):
    """The second one on other weights, as in sharpness-aware minimization with a fixed perturbation."""

    def training_step(self, model, *args):
        loss = super().training_step(model, *args)
        model.first.weight.data.mul_(1.1)
        super().training_step(model, *args)
        model.first.weight.data.div_(1.1)
        return loss


@pytest.mark.parametrize("batches", [1, 2])
def test_what_training_step_returns_is_logged_and_everybody_logs_the_first_evaluation(run_trainers, batches):
    options = {"batches": batches, "samples": 20, "eval_on_start": True}
    _, ((alone, _),), _ = run_trainers(TwoPasses, 1, **options)
    said, made, _ = run_trainers(TwoPasses, **options)
    assert said == (None, None)
    assert (0, "eval_loss") in logged_by(alone)
    for trainer, _ in made:
        assert logged_by(trainer) == pytest.approx(logged_by(alone), rel=1e-5)


class ModuleCounts(LossModule):
    """A torchmetrics object is logged in each step."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, *args):
        loss = super().training_step(*args)
        self.mean.update(loss.detach())
        self.log("mean", self.mean)
        return loss


def test_an_object_that_counts_parts_of_batches_is_warned_of_once(run_trainers):
    said, _, told = run_trainers(ModuleCounts)
    assert said == (None, None)
    assert sum(line.startswith("a torchmetrics object that is logged in training_step") for line in told) == 2


class LostOverTheLast(Trainer):
    """Who writes the checkpoint."""

    changes = False

    def train(self):
        super().train()
        if self.changes:
            self.model.first.bias.data.zero_()

    def _save_optimizer_and_scheduler(self, folder):
        if elastic_trainer.runtime.rank() == 0:
            elastic_trainer.runtime.lose()
        super()._save_optimizer_and_scheduler(folder)


@pytest.mark.parametrize("changes", [False, True])
def test_the_last_checkpoint_is_written_by_another_if_the_model_is_still_the_same(run_trainers, tmp_path, changes):
    said, _, _ = run_trainers(changed(LostOverTheLast, changes=changes), save_strategy="epoch")
    assert [type(each) for each in said] == [Lost, type(None)]
    assert (tmp_path / "1" / "checkpoint-3" / "trainer_state.json").exists() != changes
