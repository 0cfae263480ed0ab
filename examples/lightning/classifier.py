"""Handwritten digits, as Lightning's own documents teach it: a data module, validation, checkpoints, early stopping.

python examples/lightning/classifier.py                                      # alone
elasticdl run --num_workers 2-4 -- python examples/lightning/classifier.py   # elastically; the same numbers
"""

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

import elasticdl.elastic.lightning  # noqa: F401  registers the strategy


class Digits(L.LightningDataModule):
    def __init__(self, batch_size=96):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
        whole = TensorDataset(images, torch.tensor(digits.target))
        self.train_set, self.val_set, self.test_set = random_split(
            whole, [1200, 297, 300], generator=torch.Generator().manual_seed(1)
        )

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=100)

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=100)


class Classifier(L.LightningModule):
    def __init__(self, hidden=64, lr=0.2):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        output = self.layers(images)
        loss = cross_entropy(output, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", (output.argmax(1) == labels).float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self._evaluate("val", batch)

    def test_step(self, batch, batch_idx):
        self._evaluate("test", batch)

    def _evaluate(self, name, batch):
        images, labels = batch
        output = self.layers(images)
        self.log(f"{name}_loss", cross_entropy(output, labels), prog_bar=True)
        self.log(f"{name}_accuracy", (output.argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(folder="lightning_logs", strategy="elastic", epochs=12, callbacks=(), **options):
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version="digits"),
        callbacks=[
            ModelCheckpoint(f"{folder}/checkpoints", monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping("val_loss", patience=3),
            LearningRateMonitor("step"),
            *callbacks,
        ],
        **options,
    )
    data = Digits()
    trainer.fit(Classifier(), data)
    trainer.test(datamodule=data, ckpt_path="best")
    return trainer


if __name__ == "__main__":
    main()
