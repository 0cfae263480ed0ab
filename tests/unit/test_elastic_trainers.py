"""What differs between the workers of Lightning's and Hugging Face's trainers, and gradients that these trainers don't make."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from elastic_kit import SumOfThreads
from front_end_kit import be_torn
from refusal_kit import refused
from trainers_kit import Module, Net, lightning, make_data, process_is_kept, run_trainers, transformers  # noqa: F401

from elasticdl.elastic.torch_kit.participant import Host, Participant
from elasticdl.elastic.torch_kit.reducer import GradientReducer
from elasticdl.elastic.torch_kit.refusals import refuse_new_groups
from elasticdl.elastic.torch_kit.tensors import RandomStreams
from elasticdl.elastic.transformers import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3  # of an epoch

ENDED_ALONE = "1 of 2 workers ended their training after step 1 and the others go on"


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


def run_planted(kind, plant, folder, monkeypatch):
    callback = Lightnings if kind is Fitted else HuggingFaces
    callbacks = [[callback(nothing)], [callback(plant)]]
    captured = RandomStreams.capture()
    monkeypatch.setattr(RandomStreams, "capture", staticmethod(lambda: captured))
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
    said, told = run_planted(kind, plant, tmp_path, monkeypatch)
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
    said, (line,) = run_planted(kind, plant, tmp_path, monkeypatch)
    assert said == (None, None)
    assert line.startswith(f"after step {2 * STEPS} {named}: ")


# -- gradients --


class ModuleLeavesOut(Module):
    """No gradients of the third batch."""

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return None if number == 2 else loss


class ModuleLeavesOutByPart(Module):
    """One worker alone sees that in its part."""

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        return None if number == 2 and self.trainer.global_rank == 1 else loss


class ModuleLogsByPart(Module):
    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.log(f"loss of worker {self.trainer.global_rank}", loss)
        return loss


class ModuleLogs(Module):
    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss


def test_what_is_logged_rides_in_numbers_that_do_not_grow_with_the_workers(tmp_path, monkeypatch):
    """Means and sums are those of the global batch; a largest value is each worker's own, and is named once."""
    sizes, logged, told = {}, {}, {}
    ride = GradientReducer.ride
    for workers in (1, 2, 4):

        def noted(reducer, name, numbers, workers=workers):
            sizes.setdefault(workers, set()).add(len(numbers))
            ride(reducer, name, numbers)

        monkeypatch.setattr(GradientReducer, "ride", noted)
        said, made, told[workers] = run_trainers(ModuleLogs, tmp_path, monkeypatch, workers)
        assert said == (None,) * workers
        logged[workers] = [{k: float(v) for k, v in trainer.callback_metrics.items()} for trainer, _ in made]
    assert sizes[2] == sizes[4]
    for workers in (2, 4):
        for one in logged[workers]:
            assert one["samples"] == 24
            assert one["loss_epoch"] == pytest.approx(logged[1][0]["loss_epoch"], rel=1e-5)
            assert one["loss_step"] == pytest.approx(logged[1][0]["loss_step"], rel=1e-5)
        assert max(one["largest"] for one in logged[workers]) == logged[1][0]["largest"]
        assert (
            sum("the largest or smallest 'largest' is that of each worker's part" in line for line in told[workers])
            == workers
        )
    assert not told[1]


class TrainerOfOnesOwn(Trainer): ...


@pytest.mark.parametrize("kind", [Module, Trainer, TrainerOfOnesOwn])
def test_nobody_asks_after_a_step_whether_to_stop(tmp_path, monkeypatch, kind):
    asked, ask = [], SumOfThreads.sum_asked
    monkeypatch.setattr(SumOfThreads, "sum_asked", lambda *given: (asked.append(given), ask(*given)))
    said, made, _ = run_trainers(kind, tmp_path, monkeypatch)
    assert said == (None, None)
    assert [
        trainer.global_step if isinstance(trainer, lightning.Trainer) else trainer.state.global_step
        for trainer, _ in made
    ] == [3] * 2
    assert not asked


class ModuleStops(Module):
    """One worker stops, by its part of the first batch."""

    def on_train_batch_end(self, *_):
        self.trainer.should_stop = self.decided(self.trainer.global_rank == 0)

    def decided(self, wish):
        return self.trainer.strategy.broadcast(wish)


class ModuleStopsAlone(ModuleStops):
    def decided(self, wish):
        return wish


def test_a_decision_to_stop_is_made_for_all_by_the_trainers_strategy_and_else_ends_the_job(tmp_path, monkeypatch):
    said, made, _ = run_trainers(ModuleStops, tmp_path, monkeypatch)
    assert said == (None, None)
    assert [trainer.global_step for trainer, _ in made] == [1, 1]
    said, *_ = run_trainers(ModuleStopsAlone, tmp_path, monkeypatch)
    assert all(ENDED_ALONE in str(each) for each in said)


class TrainerStops(transformers.TrainerCallback):
    """One worker stops, by its own clock; or the first one, after an evaluation."""

    def __init__(self, hook, stops):
        setattr(self, hook, self.stop)
        self.stops = stops

    def stop(self, args, state, control, **_):
        control.should_training_stop = self.stops


def test_what_the_first_worker_decides_after_an_evaluation_all_do_and_else_the_job_ends(tmp_path, monkeypatch):
    def run(hook, **options):
        return run_trainers(
            Trainer, tmp_path, monkeypatch, callbacks=lambda rank: [TrainerStops(hook, rank == 0)], **options
        )

    said, made, _ = run("on_evaluate", eval_strategy="steps", eval_steps=2)
    assert said == (None, None)
    assert [trainer.state.global_step for trainer, _ in made] == [2, 2]
    said, *_ = run("on_step_end")
    assert all(ENDED_ALONE in str(each) for each in said)


class WithBeside:
    """An optimizer of the script's own, of a part of the model that the trainer's optimizer lacks."""

    def begin(self, net):
        self.beside = torch.optim.SGD(net.aside.parameters(), lr=0.1)

    def step_beside(self):
        self.beside.step()
        self.beside.zero_grad()


class ModuleWithBeside(WithBeside, Module):
    def configure_optimizers(self):
        self.begin(self.net)
        return torch.optim.SGD(self.net.trained(), lr=0.1)

    def on_train_batch_end(self, *_):
        self.step_beside()


class TrainerWithBeside(WithBeside, Trainer):
    def create_optimizer(self, model=None):
        self.begin(self.model)
        self.optimizer = torch.optim.SGD(self.model.trained(), lr=0.1)
        return self.optimizer

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.step_beside()
        return loss


class TrainerWithCopies(Trainer):
    """Each batch has an optimizer of its own, of copies of the model's parameters, as in meta-learning."""

    def training_step(self, *args, **kwargs):
        copies = [each.detach().clone().requires_grad_() for each in self.model.first.parameters()]
        sum(each.square().sum() for each in copies).backward()
        torch.optim.SGD(copies, lr=0.1).step()
        return super().training_step(*args, **kwargs)


class ModuleClips(Module):
    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class TrainerClips(Trainer):
    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss


@pytest.mark.parametrize("batches", [1, 2])
def test_a_batch_that_all_workers_of_lightnings_leave_out_has_no_gradients(tmp_path, monkeypatch, batches):
    options = {"batches": batches, "samples": 64}
    _, ((alone, expected),), _ = run_trainers(ModuleLeavesOut, tmp_path, monkeypatch, 1, **options)
    said, made, _ = run_trainers(ModuleLeavesOut, tmp_path, monkeypatch, **options)
    assert said == (None, None)
    for trainer, net in made:
        torch.testing.assert_close(list(net.parameters()), list(expected.parameters()), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(trainer.callback_metrics, alone.callback_metrics)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ModuleLeavesOutByPart, "training_step returned None for a part of a batch on some workers and a loss on"),
        (ModuleLogsByPart, "the workers tell each other different numbers with a step's gradients, this one "),
    ],
)
def test_workers_that_go_by_their_parts_of_a_batch_are_refused(tmp_path, monkeypatch, kind, words):
    said, _, _ = run_trainers(kind, tmp_path, monkeypatch)
    assert all(str(line).startswith(words) for line in said), said


@pytest.mark.parametrize("kind", [ModuleWithBeside, TrainerWithBeside, TrainerWithCopies])
def test_an_optimizer_beside_the_trainers_is_refused(tmp_path, monkeypatch, kind):
    said, _, _ = run_trainers(kind, tmp_path, monkeypatch)
    (line,) = set(map(str, said))
    assert line.startswith("SGD steps while a batch is trained on, and was not given before"), line


@pytest.mark.parametrize(
    ("kind", "batches", "where"),
    [(ModuleClips, 2, "on_before_optimizer_step"), (TrainerClips, 1, "on_pre_optimizer_step"), (ModuleClips, 1, "")],
)
def test_gradients_that_are_changed_before_they_are_summed_are_refused(tmp_path, monkeypatch, kind, batches, where):
    said, _, _ = run_trainers(kind, tmp_path, monkeypatch, batches=batches, samples=16)
    if not where:
        assert said == (None, None)
        return
    (line,) = set(map(str, said))
    assert "or changed, as by clipping, before those of all workers are summed" in line, line
    assert f"change them in {where}" in line


class ModuleInTurn(Module):
    """Two parts of one shape, of which one worker takes the other one in the third batch."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.other = Net()

    def training_step(self, batch, number):
        chosen = (number + (number == 2 and self.trainer.global_rank)) % 2
        optimizer = self.optimizers()[chosen]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward((self.net if chosen else self.other)(*batch)["loss"])
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.other, self.net)]


def test_gradients_of_one_network_are_not_summed_with_those_of_another(tmp_path, monkeypatch):
    said, _, _ = run_trainers(ModuleInTurn, tmp_path, monkeypatch)
    (line,) = set(map(str, said))
    assert line.startswith("the workers made gradients of different parameters in one manual_backward"), line
    said, _, _ = run_trainers(ModuleInTurn, tmp_path, monkeypatch, samples=16)
    assert said == (None, None)


class ModulePast(Module):
    """Its gradients are not summed."""

    automatic_optimization = False

    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.optimizers().zero_grad()
        loss.backward()
        self.optimizers().step()


class ModuleEvaluatesTwice(Module):
    """As for sharpness-aware minimization: the second gradients come after the sum."""

    def optimizer_step(self, epoch, batch, optimizer, closure):
        closure()
        optimizer.step(closure)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ModulePast, "the training step has updated by gradients of this worker's part alone: "),
        (ModuleEvaluatesTwice, f"after step {STEPS} worker 0 and worker 1 hold different states: "),
    ],
)
def test_gradients_that_are_not_summed_make_two_models(tmp_path, monkeypatch, kind, words):
    said, _, _ = run_trainers(kind, tmp_path, monkeypatch, epochs=2)
    (line,) = set(map(str, said))
    assert line.startswith(words), line


class TwoPasses(Trainer):
    """The second one on other weights, as in sharpness-aware minimization with a fixed perturbation."""

    def training_step(self, model, *args):
        loss = super().training_step(model, *args)
        model.first.weight.data.mul_(1.1)
        super().training_step(model, *args)
        model.first.weight.data.div_(1.1)
        return loss


@pytest.mark.parametrize("batches", [1, 2])
def test_what_training_step_returns_is_logged_and_everybody_logs_the_first_evaluation(tmp_path, monkeypatch, batches):
    options = {"batches": batches, "samples": 20, "eval_on_start": True}
    _, ((alone, _),), _ = run_trainers(TwoPasses, tmp_path, monkeypatch, 1, **options)
    said, made, _ = run_trainers(TwoPasses, tmp_path, monkeypatch, **options)
    assert said == (None, None)
    names, values = history(alone)
    assert names[0] == "eval_loss"
    for trainer, _ in made:
        assert history(trainer) == (names, pytest.approx(values, rel=1e-5))


def history(trainer):
    found = [(name, each[name]) for each in trainer.state.log_history for name in ("loss", "eval_loss") if name in each]
    return [name for name, _ in found], [value for _, value in found]


class ModuleCounts(Module):
    """A torchmetrics object is logged in each step."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, *args):
        loss = super().training_step(*args)
        self.mean.update(loss.detach())
        self.log("mean", self.mean)
        return loss


def test_an_object_that_counts_parts_of_batches_is_warned_of_once(tmp_path, monkeypatch):
    said, _, told = run_trainers(ModuleCounts, tmp_path, monkeypatch)
    assert said == (None, None)
    assert sum(line.startswith("a torchmetrics object that is logged in training_step") for line in told) == 2


class SkipsByPart(Trainer):
    """No gradients of a batch that has this label, which only one worker's part may have."""

    def training_step(self, model, inputs, *args):
        return torch.tensor(0.0) if self.skips(inputs["labels"]) else super().training_step(model, inputs, *args)

    def skips(self, labels):
        return self.state.global_step == 1 and 2 in labels


class SkipsByStep(SkipsByPart):
    def skips(self, labels):
        return self.state.global_step == 1


def test_workers_that_skip_a_batch_by_their_parts_of_it_are_refused(tmp_path, monkeypatch):
    said, _, _ = run_trainers(SkipsByPart, tmp_path, monkeypatch)
    (line,) = set(map(str, said))
    assert line.startswith("training_step made gradients of a batch on some workers and none on others"), line


@pytest.mark.parametrize("batches", [1, 2])
def test_a_batch_that_all_workers_skip_has_no_gradients(tmp_path, monkeypatch, batches):
    _, ((alone, expected),), _ = run_trainers(SkipsByStep, tmp_path, monkeypatch, 1, batches=batches, samples=40)
    said, made, _ = run_trainers(SkipsByStep, tmp_path, monkeypatch, batches=batches, samples=40)
    assert said == (None, None)
    for trainer, model in made:
        assert history(trainer)[1] == pytest.approx(history(alone)[1], rel=1e-5)
        torch.testing.assert_close(list(model.parameters()), list(expected.parameters()), rtol=1e-4, atol=1e-6)


class StopsWithin(transformers.TrainerCallback):
    def on_substep_end(self, args, state, control, **_):
        control.should_training_stop = True


def test_a_stop_between_two_batches_of_a_step_is_refused(tmp_path, monkeypatch):
    said, _, _ = run_trainers(Trainer, tmp_path, monkeypatch, callbacks=lambda rank: [StopsWithin()], batches=2)
    (line,) = set(map(str, said))
    assert line.startswith("a callback stops training between two batches of a step"), line


class DrawingModule(Module):
    def on_train_batch_end(self, *_):
        self.net.drawn.append(torch.rand(1).item())


class DrawingTrainer(Trainer):
    def _maybe_log_save_evaluate(self, *args, **kwargs):  # after each step
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.model.drawn.append(torch.rand(1).item())


@pytest.mark.parametrize("kind", [DrawingModule, DrawingTrainer])
def test_a_torn_step_leaves_the_scripts_random_numbers_and_is_made_once(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(Net, "drawn", [], raising=False)
    found = []
    for torn in (-1, 2):
        Net.drawn = []
        said, ((_, net),), _ = be_torn(monkeypatch, torn, lambda: run_trainers(kind, tmp_path, monkeypatch, 1))
        assert said == (None,)
        found.append((Net.drawn, *net.parameters()))
    (numbers, *whole), (same, *torn) = found
    assert same == numbers
    torch.testing.assert_close(torn, whole, rtol=1e-5, atol=1e-6)


def test_a_group_that_is_added_while_a_trainer_trains_is_refused_in_one_line():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refuse_new_groups(optimizer, "give all parameters in configure_optimizers")
    optimizer.load_state_dict(optimizer.state_dict())
    refused(
        "added to SGD while the trainer trains, .* have it: give all",
        lambda: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
    )


def test_a_torn_step_begins_again_with_the_attributes_of_before():
    """With these a newcomer begins it, and the workers are compared then."""
    said = []
    attributes = SimpleNamespace(note=lambda: "counted", put_back=said.append)
    reducer = SimpleNamespace(reset_buffers=lambda: None, drop_gradients=lambda: None)
    participant = Participant.__new__(Participant)
    participant._host = SimpleNamespace(as_before_step=nullcontext)
    participant.open_batches = [SimpleNamespace(noted="of before")]
    participant._host = Host()
    participant.state = SimpleNamespace(
        attributes=attributes, reducer=reducer, waits=False, begin_step=lambda: said.append("begins")
    )
    participant._begin_again()
    assert said == ["of before", "begins", "counted"]
