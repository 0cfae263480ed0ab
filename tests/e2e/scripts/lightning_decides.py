"""What a worker decides by its own part of a batch: to leave a batch out, and to stop. Says where it ends."""

import logging
import sys
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.lightning  # noqa: F401

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Stop(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and (batch[1] > 90).any():
            trainer.should_stop = True


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        return loss if torch.isfinite(loss) else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0005, momentum=0.9)


if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(60, 4) + 1
    labels = inputs.sum(1, keepdim=True)
    labels[27], labels[43] = float("nan"), 100.0
    trainer = lightning.Trainer(
        strategy=sys.argv[1],
        max_epochs=3,
        accumulate_grad_batches=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Stop()],
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(inputs, labels), batch_size=10))
    batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
    print("decided", trainer.current_epoch, trainer.global_step, batches, f"{module.layer.weight.sum().item():.5f}")
