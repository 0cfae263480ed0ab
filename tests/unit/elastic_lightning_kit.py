"""What tests of Lightning's strategy share: trainers of a job of this process, and modules."""

import torch
from front_end_kit import OwnJob
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from trainers_kit import lightning, make_data

from elasticdl.elastic.lightning import strategy


def make_strategy(*, takes_part_alone=True):
    made = strategy.make_strategy("lightning.pytorch", OwnJob())()
    made.takes_part_alone = takes_part_alone
    return made


def trainer_with(made=None, **options):
    """Which writes nothing."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(strategy=made or make_strategy(), accelerator="cpu", **{**quiet, **options})


def loader_of(samples=50, **options):
    return DataLoader(make_data(samples), batch_size=8, **options)


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


def changed(kind=Module, **functions):
    """A module of this kind with other functions."""
    return type("Changed", (kind,), functions)()
