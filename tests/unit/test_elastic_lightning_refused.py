"""What can't be had with Lightning's trainer is one line, before it trains or as it does."""

import pickle
from functools import partial

import pytest
import torch
from elastic_lightning_kit import ManualModule, Module, changed, lightning, loader_of, make_strategy, trainer_with
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.data import has_len_all_ranks
from refusal_kit import refused
from torch.nn.functional import cross_entropy
from torch.utils.data import ChainDataset, DataLoader
from trainers_kit import make_data, process_is_kept  # noqa: F401

from elasticdl.elastic.lightning import fit_host as requirements

pytestmark = pytest.mark.filterwarnings("ignore")


def with_sync_batch_norm():
    module = Module()
    module.layers[1] = torch.nn.SyncBatchNorm(16)
    return module


def quasi_newton():
    return changed(configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters()))


@pytest.mark.parametrize(
    ("module", "loader", "options", "words"),
    [
        (lambda: changed(configure_optimizers=lambda self: None), None, {}, "returns no optimizer"),
        (with_sync_batch_norm, None, {}, "layers.1 is a SyncBatchNorm"),
        (quasi_newton, None, {}, "LBFGS evaluates its closure several times"),
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
        (Module, DataLoader(ChainDataset([])), {}, "what is only iterated over can't be divided"),
        (Module, [loader_of(), loader_of()], {}, "there are several train loaders"),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_what_cant_be_had_is_refused_in_one_line(module, loader, options, words, alone):
    trainer = trainer_with(make_strategy(takes_part_alone=not alone), **options)
    said = refused(words, lambda: trainer.fit(module(), loader_of() if loader is None else loader))
    assert said.startswith(requirements.WHO)


def of_a_sum(self, batch, batch_idx):
    return {"loss": cross_entropy(self.layers(batch[0]), batch[1], reduction="sum")}


def of_a_sum_by_hand(self, batch, batch_idx):
    self.manual_backward(cross_entropy(self.layers(batch[0]), batch[1], reduction="sum"))


def and_another_pass(self, batch, batch_idx):
    loss = Module.training_step(self, batch, batch_idx)
    torch.autograd.backward(0.1 * self.layers(batch[0]).square().mean())
    return loss


@pytest.mark.parametrize(
    ("kind", "step", "options", "words"),
    [
        (Module, of_a_sum, {}, "the loss is a sum over the samples"),
        (ManualModule, of_a_sum_by_hand, {}, "the loss is a sum over the samples"),
        (Module, and_another_pass, {"accumulate_grad_batches": 2}, "otherwise than by the loss of training_step"),
        (Module, and_another_pass, {}, None),  # Lightning clears its gradients
    ],
)
def test_what_can_not_be_right_as_it_trains_is_one_line(kind, step, options, words):
    trainer = trainer_with(max_epochs=2, **options)
    use = partial(trainer.fit, changed(kind, training_step=step), loader_of())
    if words:
        refused(words, use)
    else:
        use()


def test_a_tuner_tunes_alone_and_is_refused_in_one_line_otherwise(tmp_path):
    sized = {
        "batch_size": 4,
        "train_dataloader": lambda self: DataLoader(make_data(50), batch_size=self.batch_size, shuffle=True),
        "val_dataloader": lambda self: DataLoader(make_data(20), batch_size=self.batch_size),
    }
    alone, module = make_strategy(takes_part_alone=False), changed(**sized)
    options = {"default_root_dir": tmp_path, "enable_checkpointing": True, "max_epochs": 1}
    found = Tuner(trainer_with(alone, **options)).scale_batch_size(module, init_val=8, max_trials=2)
    assert found == module.batch_size == (16 if lightning.__version__ >= "2.6" else 32)  # 2.5 goes one too far
    tuner = Tuner(trainer_with(**options))
    for tune, callback in ((tuner.scale_batch_size, "BatchSizeFinder"), (tuner.lr_find, "LearningRateFinder")):
        refused(f"{callback} trains several times", partial(tune, changed(**sized)))


def test_a_callback_that_exchanges_schedulers_is_refused_where_workers_may_come_later():
    def fit_with(made):
        module = changed(configure_optimizers=lambda self: torch.optim.SGD(self.parameters(), lr=0.1))
        trainer_with(made, callbacks=[StochasticWeightAveraging(0.1)], max_epochs=1).fit(module, loader_of())

    refused("StochasticWeightAveraging exchanges the scheduler", lambda: fit_with(make_strategy()))
    fit_with(make_strategy(takes_part_alone=False))


def test_it_is_found_by_its_name():
    import elasticdl.elastic.lightning as ours

    trainer = lightning.Trainer(strategy="elastic", accelerator="cpu", logger=False)
    assert isinstance(trainer.strategy, ours.ElasticStrategy)
    assert trainer.is_global_zero
    assert has_len_all_ranks(DataLoader(make_data(50)), trainer.strategy)  # before there is a module
    assert isinstance(pickle.loads(pickle.dumps(trainer)).strategy, ours.ElasticStrategy)
