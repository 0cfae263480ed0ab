"""Fits up to an epoch, from a checkpoint if there is one, else with processes that load data, which import Lightning each.

lightning_resumes.py FOLDER STRATEGY EPOCHS [CHECKPOINT]
"""

import os
import sys
import time

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.lightning  # noqa: F401


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Linear(8, 3)

    def training_step(self, batch, batch_idx):
        if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
            time.sleep(0.3)
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self.layers(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


if __name__ == "__main__":
    folder, strategy, epochs, *checkpoint = sys.argv[1:]
    L.seed_everything(1)
    pixels = torch.randn(60, 8)
    data = TensorDataset(pixels, pixels[:, :3].argmax(1))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=int(epochs),
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version="log"),
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
    )
    options = {"batch_size": 10, "num_workers": 0 if checkpoint else 1}
    module = Module()
    train_loader, val_loader = DataLoader(data, shuffle=True, **options), DataLoader(data, **options)
    trainer.fit(module, train_loader, val_loader, ckpt_path=checkpoint[0] if checkpoint else None)
    predicted = torch.cat(trainer.predict(module, DataLoader(data, batch_size=10)))
    if trainer.is_global_zero:
        print("predicted", "".join(map(str, predicted.tolist())), trainer.global_step, flush=True)
