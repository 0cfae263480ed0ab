"""What differs between the workers of Lightning's and Hugging Face's trainers is named; the pieces are the trainers' own."""

import re

import pytest
import torch
from trainers_kit import Module, lightning, process_is_kept, run_trainers, transformers  # noqa: F401

from elasticdl.elastic.transformers import Trainer

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("process_is_kept")]
STEPS = 3  # of an epoch


class Fitted(Module):
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


class HuggingFaces(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    """The same."""

    def __init__(self, plant):
        self.plant, self.wait = plant, 0

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        if state.global_step == STEPS + 1:
            state.best_metric = 0.2 if self.plant is best_metric else None
            self.plant(model, getattr(optimizer, "optimizer", optimizer), lr_scheduler, self)

    def state(self):
        return {"args": {}, "attributes": {"wait": self.wait}}


def rate(model, optimizer, scheduler, callback):
    optimizer.param_groups[0]["lr"] = 0.5


def scheduler(model, optimizer, scheduler, callback):
    scheduler._step_count += 1


def weight(model, optimizer, scheduler, callback):
    with torch.no_grad():
        model.first.weight *= 1.01


def wait(model, optimizer, scheduler, callback):
    callback.wait = 7


def best_metric(model, optimizer, scheduler, callback): ...


def nothing(model, optimizer, scheduler, callback): ...


def run(kind, plant, folder, monkeypatch):
    callback = Lightnings if kind is Fitted else HuggingFaces
    callbacks = [[callback(nothing)], [callback(plant)]]
    said, _, told = run_trainers(kind, folder, monkeypatch, callbacks=callbacks.__getitem__, epochs=3)
    # The random streams of the two threads are those of one process, and may differ as well.
    told = [re.sub(r"random\.[^;:]*(; )?|; and 1 more", "", line).replace("; :", ":") for line in told]
    return said, [line for line in told if not re.match(r"after step \d+ :", line)]


@pytest.mark.parametrize("kind", [Fitted, Trainer])
@pytest.mark.parametrize(
    ("plant", "step", "named"),
    [
        (rate, STEPS + 1, "optimizer.param_groups.0.lr is 0."),
        (scheduler, 2 * STEPS, "scheduler._step_count is "),
        (weight, 2 * STEPS, "first.weight differs by 0.0"),
    ],
)
def test_what_makes_two_models_ends_the_job(tmp_path, monkeypatch, kind, plant, step, named):
    said, told = run(kind, plant, tmp_path, monkeypatch)
    (line,) = set(map(str, said))
    assert line.startswith(f"after step {step} worker 0 and worker 1 hold different states: "), line
    assert named in line
    assert told == []


@pytest.mark.parametrize(
    ("kind", "plant", "named"),
    [
        (Fitted, wait, "callbacks.Lightnings.wait is 0 on worker 0 and 7 on worker 1"),
        (Trainer, wait, "callbacks.HuggingFaces.wait is 0 on worker 0 and 7 on worker 1"),
        (Trainer, best_metric, "trainer.best_metric is None on worker 0 and 0.2 on worker 1"),
    ],
)
def test_what_does_not_is_told_once(tmp_path, monkeypatch, kind, plant, named):
    said, (line,) = run(kind, plant, tmp_path, monkeypatch)
    assert said == (None, None)
    assert line.startswith(f"after step {2 * STEPS} {named}: ")
