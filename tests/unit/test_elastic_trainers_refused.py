"""What scripts of Lightning's and Hugging Face's trainers do that can't be had is one line on each worker; and what is near to it and can."""

import lightning.pytorch as lightning
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from refusal_kit import refused, require_refusal
from torch.nn.functional import cross_entropy
from torch.utils.data import ChainDataset, DataLoader
from trainer_benches import LossModule, NetWithLoss, OwnJob, changed, leaves_out, loader_of, make_strategy, sgd, skips

from elasticdl.elastic.transformers import Trainer, elastic_trainer, patch

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3  # of an epoch
ENDED_ALONE = "1 of 2 workers ended their training after step 1 and the others go on"


# -- of Lightning's modules --


def module(**functions):
    return changed(LossModule, **functions)


def with_sync_batch_norm(self):
    LossModule.__init__(self)
    self.net.first = torch.nn.SyncBatchNorm(16)


def of_a_sum(self, batch, number):
    self.manual_backward(cross_entropy(self.net.last(self.net.first(batch[0])), batch[1], reduction="sum"))


def and_another_pass(self, batch, number):
    loss = LossModule.training_step(self, batch, number)
    torch.autograd.backward(0.1 * self.net(*batch)["loss"])
    return loss


def logs_by_part(self, batch, number):
    loss = LossModule.training_step(self, batch, number)
    self.log(f"loss of worker {self.trainer.global_rank}", loss)
    return loss


def adds_a_group(self, *_):
    self.trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})


class Stops(LossModule):
    """One worker stops, by its part of the first batch."""

    def on_train_batch_end(self, *_):
        self.trainer.should_stop = self.decided(self.trainer.global_rank == 0)

    def decided(self, wish):
        return self.trainer.strategy.broadcast(wish)


class Clips(LossModule):
    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class InTurn(LossModule):
    """Two parts of one shape, of which one worker takes the other one in the third batch."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.other = NetWithLoss()

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


class EvaluatesTwice(LossModule):
    """As for sharpness-aware minimization: the second gradients come after the sum."""

    def optimizer_step(self, epoch, batch, optimizer, closure):
        closure()
        optimizer.step(closure)


BY_PART = leaves_out(lambda module, number: number == 2 and module.trainer.global_rank == 1)


# -- of Hugging Face's trainer --


class StopsAlone(transformers.TrainerCallback):
    """One worker stops, by its own clock; or the first one, after an evaluation; or between two batches of a step."""

    def __init__(self, hook, what="should_training_stop", stops=True):
        setattr(self, hook, self.stop)
        self.what, self.stops = what, stops

    def stop(self, args, state, control, **_):
        setattr(control, self.what, self.stops)


def stop_in(*hook):
    return {"callbacks": lambda rank: [StopsAlone(*hook, stops=rank == 0)]}


def stops_within(rank):
    return [StopsAlone("on_substep_end")]


class Beside(Trainer):
    """An optimizer of the script's own, of a part of the model that the trainer's optimizer lacks."""

    def create_optimizer(self, model=None):
        self.beside = sgd(self.model.aside)
        self.optimizer = sgd(self.model.first, self.model.last)
        return self.optimizer

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.beside.step()
        self.beside.zero_grad()
        return loss


class WithCopies(Trainer):
    """Each batch has an optimizer of its own, of copies of the model's parameters, as in meta-learning."""

    def training_step(self, *args, **kwargs):
        copies = [each.detach().clone().requires_grad_() for each in self.model.first.parameters()]
        sum(each.square().sum() for each in copies).backward()
        torch.optim.SGD(copies, lr=0.1).step()
        return super().training_step(*args, **kwargs)


class TrainerClips(Trainer):
    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss


class OwnBackward(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss.backward()
        return loss.detach()


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return [[self.train_dataset[0]]]


class WithoutModel(Trainer):
    def train(self, *args, **kwargs):
        self.model = None  # as `hyperparameter_search` begins, whatever it searches with
        return super().train(*args, **kwargs)


class TwiceTrained(Trainer):
    def train(self, *args, **kwargs):
        super().train(*args, **kwargs)
        return super().train(*args, **kwargs)


WHO = r'^Trainer\(strategy="elastic"\): '
ITERATED = ChainDataset([])
BESIDE = "SGD steps while a batch is trained on, and was not given before"
CHANGED = "or changed, as by clipping, before those of all workers are summed.* change them in "
EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}

REFUSED = [  # the script, and the line
    (module(configure_optimizers=lambda self: None), {}, WHO + ".*returns no optimizer"),
    (module(__init__=with_sync_batch_norm), {}, WHO + ".*first is a SyncBatchNorm"),
    (LossModule, {"devices": 2}, WHO + ".*devices=2; expected one"),
    (LossModule, {"num_nodes": 2}, WHO + ".*num_nodes=2; leave it out"),
    (LossModule, {"sync_batchnorm": True}, WHO + ".*sync_batchnorm=True needs a process group"),
    (LossModule, {"loader": DataLoader(ITERATED)}, WHO + ".*what is only iterated over can't be divided"),
    (LossModule, {"loader": [loader_of(), loader_of()]}, WHO + ".*there are several train loaders"),
    (LossModule, {"callbacks": lambda rank: [StochasticWeightAveraging(0.1)]}, "exchanges the scheduler"),
    (changed(InTurn, training_step=of_a_sum), {"epochs": 2}, "the loss is a sum over the samples"),
    (module(training_step=and_another_pass), {"batches": 2}, "otherwise than by the loss of training_step"),
    (module(on_train_batch_end=adds_a_group), {}, "added to SGD while the trainer trains, .* have it: give all"),
    (BY_PART, {}, "^training_step returned None for a part of a batch on some workers and a loss on"),
    (module(training_step=logs_by_part), {}, "^the workers tell each other different numbers with a step's gradients"),
    (changed(Stops, decided=lambda self, wish: wish), {}, ENDED_ALONE),
    (Clips, {"batches": 2}, CHANGED + "on_before_optimizer_step"),
    (InTurn, {}, "^the workers made gradients of different parameters in one manual_backward"),
    (EvaluatesTwice, {"epochs": 2}, f"after step {STEPS} worker 0 and worker 1 hold different states: "),
    (Trainer, {"data": ITERATED, "max_steps": 3}, "the training data is a ChainDataset"),
    (Trainer, {"auto_find_batch_size": True}, "auto_find_batch_size changes the batch size"),
    (Trainer, {"enable_jit_checkpoint": True}, "enable_jit_checkpoint stops all workers"),
    (Trainer, {"optim": "lomo"}, "optim='lomo' steps during the backward pass"),
    (OwnLoader, {}, r"^elastic\.transformers: the loader is a list"),
    (OwnBackward, {}, r"otherwise than by accelerator.backward\(loss\)"),
    (WithoutModel, {}, "hyperparameter_search trains several times"),
    (TwiceTrained, {}, "a script trains once"),
    (skips(lambda labels: 2 in labels), {}, "^training_step made gradients of a batch on some workers and none on"),
    (Trainer, stop_in("on_step_end"), ENDED_ALONE),
    (Trainer, {"callbacks": stops_within, "batches": 2}, "^a callback stops training between two batches of a"),
    (Beside, {}, BESIDE),
    (WithCopies, {}, BESIDE),
    (TrainerClips, {}, CHANGED + "on_pre_optimizer_step"),
]


@pytest.mark.parametrize(("kind", "options", "words"), REFUSED)
def test_what_cant_be_had_is_one_line_on_each_worker(run_trainers, kind, options, words):
    said, _, _ = run_trainers(kind, **options)
    for error in said:
        require_refusal(error, words)


@pytest.mark.parametrize(
    ("kind", "options", "steps"),
    [
        (Stops, {}, 1),  # its strategy has one decide for all
        (Trainer, {**stop_in("on_evaluate"), **EVALUATES}, 2),  # the first worker does
        (Trainer, {**stop_in("on_evaluate", "should_epoch_stop"), **EVALUATES}, 2),
        (Clips, {"samples": 16}, 2),  # Lightning sums before the hook
        (InTurn, {"samples": 16}, 2),
        (module(training_step=and_another_pass), {}, 3),  # whose gradients Lightning clears
    ],
)
def test_what_all_do_alike_is_trained(run_trainers, kind, options, steps):
    said, made, _ = run_trainers(kind, **options)
    assert said == (None, None)
    counted = [each if isinstance(each, lightning.Trainer) else each.state for each, _ in made]
    assert [each.global_step for each in counted] == [steps] * 2


def test_a_tuner_tunes_alone_and_is_refused_otherwise(tmp_path):
    def tuner(takes_part_alone):
        made = make_strategy(OwnJob(), takes_part_alone=takes_part_alone)
        quiet = {"logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
        return Tuner(lightning.Trainer(strategy=made, accelerator="cpu", max_epochs=1, **quiet))

    sized = module(batch_size=4, train_dataloader=lambda self: loader_of(batch_size=self.batch_size))
    assert tuner(False).scale_batch_size(sized(), init_val=8, max_trials=2) >= 16
    refused("BatchSizeFinder trains several times", lambda: tuner(True).scale_batch_size(sized()))
    refused("LearningRateFinder trains several times", lambda: tuner(True).lr_find(sized()))


def test_what_is_no_trainer_or_one_of_an_older_transformers_is_refused(monkeypatch):
    refused("this is a list; expected a", lambda: patch([]))
    monkeypatch.delattr(transformers.Trainer, "_run_epoch")
    trainer = transformers.Trainer.__new__(transformers.Trainer)
    refused(r"is too old: install 5\.3 or a later version", lambda: elastic_trainer.require_elastic(trainer))
