"""Where workers of Lightning's trainer ask each other, and what they load and write."""

from types import SimpleNamespace

import pytest
import torch
from elastic_lightning_kit import Module, lightning, loader_of, trainer_with
from lightning.pytorch.loggers import CSVLogger
from trainers_kit import process_is_kept  # noqa: F401

from elasticdl.elastic.lightning.fit_host import Writing
from elasticdl.elastic.torch_kit.participant import Participant

pytestmark = pytest.mark.filterwarnings("ignore")


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
