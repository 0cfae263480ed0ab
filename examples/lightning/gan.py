"""Two networks that train against each other, by manual optimization, as Lightning's own documents teach it: handwritten digits.

python examples/lightning/gan.py                                      # alone
elasticdl run --num_workers 2-4 -- python examples/lightning/gan.py   # elastically; the same numbers
"""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset, random_split

import elasticdl.elastic.lightning  # noqa: F401  registers the strategy


class Digits(L.LightningDataModule):
    """Images, and the noise that the generator is given beside each: so it does not depend on who trains on which image."""

    def __init__(self, noise=16, batch_size=96):
        super().__init__()
        self.noise, self.batch_size = noise, batch_size

    def setup(self, stage):
        images = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1) / 8 - 1
        noise = torch.randn(len(images), self.noise, generator=torch.Generator().manual_seed(2))
        whole = TensorDataset(images, noise)
        self.train_set, self.val_set = random_split(whole, [1500, 297], generator=torch.Generator().manual_seed(1))

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=100)


class GAN(L.LightningModule):
    def __init__(self, noise=16, hidden=64, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(noise, hidden), nn.ReLU(), nn.Linear(hidden, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(64, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, 1))

    def loss(self, images, is_real):
        judged = self.discriminator(images)
        return binary_cross_entropy_with_logits(judged, torch.full_like(judged, float(is_real)))

    def training_step(self, batch, batch_idx):
        images, noise = batch
        of_generator, of_discriminator = self.optimizers()

        self.toggle_optimizer(of_generator)
        generated = self.loss(self.generator(noise), is_real=True)
        of_generator.zero_grad()
        self.manual_backward(generated)
        of_generator.step()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        judged = (self.loss(images, is_real=True) + self.loss(self.generator(noise).detach(), is_real=False)) / 2
        of_discriminator.zero_grad()
        self.manual_backward(judged)
        self.clip_gradients(of_discriminator, gradient_clip_val=1.0)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)

        for schedule in self.lr_schedulers():
            schedule.step()
        self.log_dict({"train_loss_generator": generated, "train_loss_discriminator": judged}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        images, noise = batch
        self.log("val_real", torch.sigmoid(self.discriminator(images)).mean(), prog_bar=True)
        self.log("val_generated", torch.sigmoid(self.discriminator(self.generator(noise))).mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizers = [
            torch.optim.Adam(each.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
            for each in (self.generator, self.discriminator)
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 50, 0.9) for each in optimizers]


def main(folder="lightning_logs", strategy="elastic", epochs=8, callbacks=(), **options):
    L.seed_everything(0)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=epochs,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version="gan"),
        callbacks=[ModelCheckpoint(f"{folder}/checkpoints", save_top_k=-1, every_n_epochs=2), *callbacks],
        **options,
    )
    trainer.fit(GAN(), datamodule=Digits())
    return trainer


if __name__ == "__main__":
    main()
