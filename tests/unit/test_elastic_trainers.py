"""What differs between the workers of Lightning's and Hugging Face's trainers, and gradients that these trainers don't make."""

import re
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from elastic_kit import SumOfThreads
from refusal_kit import refused
from trainers_kit import Module, Net, changed, lightning, process_is_kept, run_trainers, transformers  # noqa: F401

from elasticdl.elastic.torch_kit.participant import Host, Participant
from elasticdl.elastic.torch_kit.reducer import GradientReducer
from elasticdl.elastic.torch_kit.refusals import refuse_new_groups
from elasticdl.elastic.transformers import Trainer

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3  # of an epoch
ENDED_ALONE = "1 of 2 workers ended their training after step 1 and the others go on"
TWO_MODELS = "after step {} worker 0 and worker 1 hold different states: "
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run(kind, workers, ...)``: as `run_trainers`."""
    return lambda kind, *given, **options: run_trainers(kind, tmp_path, monkeypatch, *given, **options)


def sgd(*modules):
    return torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.1)


# -- what a worker alone does: it makes two models, and ends the job; or it is told once --


class Lightnings(lightning.Callback):
    """``plant`` is done after the first step of the second epoch."""

    def __init__(self, plant):
        self.plant, self.wait = plant, 0

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == STEPS + 1:
            self.plant(self, module.net, trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler)

    def state_dict(self):
        return {"wait": self.wait}


class HuggingFaces(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    """The same."""

    def __init__(self, plant):
        self.plant, self.wait = plant, 0

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **_):
        if state.global_step == STEPS + 1:
            state.best_metric = 0.2 if self.plant is best_metric else None
            self.plant(self, model, getattr(optimizer, "optimizer", optimizer), lr_scheduler)

    def state(self):
        return {"args": {}, "attributes": {"wait": self.wait}}


def rate(callback, model, optimizer, scheduler):
    optimizer.param_groups[0]["lr"] = 0.5


def steps_of_scheduler(callback, model, optimizer, scheduler):
    scheduler._step_count += 1


def weight(callback, model, optimizer, scheduler):
    model.first.weight.data *= 1.01


def wait(callback, model, optimizer, scheduler):
    callback.wait = 7


def best_metric(*_): ...


def nothing(*_): ...


def momentum_and_schedule(self):
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


Fitted = changed(Module, configure_optimizers=momentum_and_schedule)


SAID = [  # from which step on, whether it ends the job, and what is named
    (rate, STEPS + 1, True, "optimizer.param_groups.0.lr is 0."),
    (steps_of_scheduler, 2 * STEPS, True, "scheduler._step_count is "),
    (weight, 2 * STEPS, True, "first.weight differs by 0.0"),
    (wait, 2 * STEPS, False, "callbacks.{}.wait is 0 on worker 0 and 7 on worker 1: "),
]
OF_TRANSFORMERS = (best_metric, 2 * STEPS, False, "trainer.best_metric is None on worker 0 and 0.2 on worker 1: ")


@pytest.mark.parametrize(
    ("kind", "plant", "step", "ends", "named"),
    [*((kind, *row) for kind in (Fitted, Trainer) for row in SAID), (Trainer, *OF_TRANSFORMERS)],
)
def test_what_makes_two_models_ends_the_job_and_what_does_not_is_told_once(run, kind, plant, step, ends, named):
    callback = Lightnings if kind is Fitted else HuggingFaces
    callbacks = [[callback(nothing)], [callback(plant)]]
    said, _, told = run(kind, callbacks=callbacks.__getitem__, epochs=3)
    if ends:
        (line,) = set(map(str, said))
        assert line.startswith(TWO_MODELS.format(step))
        assert named in line
        assert told == []
    else:
        assert said == (None, None)
        (line,) = told
        assert line.startswith(f"after step {step} " + named.format(callback.__name__))


# -- what scripts do that can't be had with several workers, and what is near to it and can --


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


class ModuleLogsByPart(Module):
    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.log(f"loss of worker {self.trainer.global_rank}", loss)
        return loss


class ModuleStops(Module):
    """One worker stops, by its part of the first batch."""

    def on_train_batch_end(self, *_):
        self.trainer.should_stop = self.decided(self.trainer.global_rank == 0)

    def decided(self, wish):
        return self.trainer.strategy.broadcast(wish)


class StopsAlone(transformers.TrainerCallback):
    """One worker stops, by its own clock; or the first one, after an evaluation; or between two batches of a step."""

    def __init__(self, hook, what="should_training_stop", stops=True):
        setattr(self, hook, self.stop)
        self.what, self.stops = what, stops

    def stop(self, args, state, control, **_):
        setattr(control, self.what, self.stops)


def stop_in(*hook):
    return {"callbacks": lambda rank: [StopsAlone(*hook, stops=rank == 0)]}


class WithBeside:
    """An optimizer of the script's own, of a part of the model that the trainer's optimizer lacks."""

    def begin(self, net):
        self.beside = sgd(net.aside)
        return sgd(net.first, net.last)

    def step_beside(self):
        self.beside.step()
        self.beside.zero_grad()


class ModuleWithBeside(WithBeside, Module):
    def configure_optimizers(self):
        return self.begin(self.net)

    def on_train_batch_end(self, *_):
        self.step_beside()


class TrainerWithBeside(WithBeside, Trainer):
    def create_optimizer(self, model=None):
        self.optimizer = self.begin(self.model)
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
        return [sgd(self.other), sgd(self.net)]


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


class TrainerOfOnesOwn(Trainer): ...


BY_PART = leaves_out(lambda module, number: number == 2 and module.trainer.global_rank == 1)
BESIDE = "SGD steps while a batch is trained on, and was not given before"
CHANGED = "or changed, as by clipping, before those of all workers are summed.* change them in "
EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (BY_PART, {}, "^training_step returned None for a part of a batch on some workers and a loss on"),
        (skips(lambda labels: 2 in labels), {}, "^training_step made gradients of a batch on some workers and none on"),
        (ModuleLogsByPart, {}, "^the workers tell each other different numbers with a step's gradients, this one "),
        (changed(ModuleStops, decided=lambda self, wish: wish), {}, ENDED_ALONE),
        (Trainer, stop_in("on_step_end"), ENDED_ALONE),
        (
            Trainer,
            {"callbacks": lambda rank: [StopsAlone("on_substep_end")], "batches": 2},
            "^a callback stops training between two batches of a",
        ),
        (ModuleWithBeside, {}, BESIDE),
        (TrainerWithBeside, {}, BESIDE),
        (TrainerWithCopies, {}, BESIDE),
        (ModuleClips, {"batches": 2}, CHANGED + "on_before_optimizer_step"),
        (TrainerClips, {}, CHANGED + "on_pre_optimizer_step"),
        (ModuleInTurn, {}, "^the workers made gradients of different parameters in one manual_backward"),
        (ModulePast, {}, r"updated by gradients of this worker's part alone: call self.manual_backward\(loss\)"),
        (ModuleEvaluatesTwice, {"epochs": 2}, TWO_MODELS.format(STEPS)),
    ],
)
def test_what_workers_do_by_their_parts_or_past_the_sum_is_one_line(run, kind, options, words):
    said, _, _ = run(kind, **options)
    for line in map(str, said):
        assert re.search(words, line), line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("kind", "options", "steps"),
    [
        (Module, {}, STEPS),
        (Trainer, {}, STEPS),
        (TrainerOfOnesOwn, {}, STEPS),
        (ModuleStops, {}, 1),  # its strategy has one decide for all
        (Trainer, {**stop_in("on_evaluate"), **EVALUATES}, 2),  # the first worker does
        (Trainer, {**stop_in("on_evaluate", "should_epoch_stop"), **EVALUATES}, 2),
        (ModuleClips, {"samples": 16}, 2),  # Lightning sums before the hook
        (ModuleInTurn, {"samples": 16}, 2),
    ],
)
def test_what_all_do_alike_is_trained_and_nobody_asks_after_a_step_whether_to_stop(
    run, monkeypatch, kind, options, steps
):
    asked, ask = [], SumOfThreads.sum_asked
    monkeypatch.setattr(SumOfThreads, "sum_asked", lambda *given: (asked.append(given), ask(*given))[1])
    said, made, _ = run(kind, **options)
    assert said == (None, None)
    counted = [each if isinstance(each, lightning.Trainer) else each.state for each, _ in made]
    assert [each.global_step for each in counted] == [steps] * 2
    assert not asked


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("kind", [leaves_out(lambda module, number: number == 2), skips(lambda labels: True)])
def test_a_batch_that_all_workers_leave_out_has_no_gradients(run, kind, batches):
    options = {"batches": batches, "samples": 64 if issubclass(kind, Module) else 40}
    _, ((alone, expected),), _ = run(kind, 1, **options)
    said, made, _ = run(kind, **options)
    assert said == (None, None)
    for trainer, net in made:
        torch.testing.assert_close([*net.parameters()], [*expected.parameters()], **CLOSE)
        assert logged_by(trainer) == pytest.approx(logged_by(alone), rel=1e-5)


# -- what trainers log --


def logged_by(trainer):
    """By name, or by the place in the history of Hugging Face's."""
    if isinstance(trainer, lightning.Trainer):
        return {name: float(value) for name, value in trainer.callback_metrics.items()}
    rows = enumerate(trainer.state.log_history)
    return {(at, name): row[name] for at, row in rows for name in ("loss", "eval_loss") if name in row}


class ModuleLogs(Module):
    def training_step(self, batch, number):
        loss = super().training_step(batch, number)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        return loss


def test_what_is_logged_rides_in_numbers_that_do_not_grow_with_the_workers(run, monkeypatch):
    """Means and sums are those of the global batch; a largest value is each worker's own, and is named once."""
    sizes, logged, told = {}, {}, {}
    ride = GradientReducer.ride
    for workers in (1, 2, 4):

        def noted(reducer, name, numbers, workers=workers):
            sizes.setdefault(workers, set()).add(len(numbers))
            ride(reducer, name, numbers)

        monkeypatch.setattr(GradientReducer, "ride", noted)
        said, made, told[workers] = run(ModuleLogs, workers)
        assert said == (None,) * workers
        logged[workers] = [logged_by(trainer) for trainer, _ in made]
    assert sizes[2] == sizes[4]
    (alone,) = logged[1]
    for workers in (2, 4):
        largest = [one.pop("largest") for one in logged[workers]]
        assert max(largest) == alone["largest"]
        for one in logged[workers]:
            assert {**one, "largest": alone["largest"]} == pytest.approx(alone, rel=1e-5)
        own = "the largest or smallest 'largest' is that of each worker's part"
        assert sum(own in line for line in told[workers]) == workers
    assert alone["samples"] == 24
    assert not told[1]


class TwoPasses(Trainer):
    """The second one on other weights, as in sharpness-aware minimization with a fixed perturbation."""

    def training_step(self, model, *args):
        loss = super().training_step(model, *args)
        model.first.weight.data.mul_(1.1)
        super().training_step(model, *args)
        model.first.weight.data.div_(1.1)
        return loss


@pytest.mark.parametrize("batches", [1, 2])
def test_what_training_step_returns_is_logged_and_everybody_logs_the_first_evaluation(run, batches):
    options = {"batches": batches, "samples": 20, "eval_on_start": True}
    _, ((alone, _),), _ = run(TwoPasses, 1, **options)
    said, made, _ = run(TwoPasses, **options)
    assert said == (None, None)
    assert (0, "eval_loss") in logged_by(alone)
    for trainer, _ in made:
        assert logged_by(trainer) == pytest.approx(logged_by(alone), rel=1e-5)


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


def test_an_object_that_counts_parts_of_batches_is_warned_of_once(run):
    said, _, told = run(ModuleCounts)
    assert said == (None, None)
    assert sum(line.startswith("a torchmetrics object that is logged in training_step") for line in told) == 2


def test_a_group_that_is_added_while_a_trainer_trains_is_refused_in_one_line():
    optimizer = sgd(torch.nn.Linear(1, 1))
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
    participant.open_batches = [SimpleNamespace(noted="of before")]
    participant._host = Host()
    participant.state = SimpleNamespace(
        attributes=attributes, reducer=reducer, waits=False, begin_step=lambda: said.append("begins")
    )
    participant._begin_again()
    assert said == ["of before", "begins", "counted"]
