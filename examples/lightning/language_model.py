"""A small causal language model, made from a configuration, on text that a rule makes.

python examples/lightning/language_model.py                                      # alone
elasticdl run --num_workers 2-4 -- python examples/lightning/language_model.py   # elastically; the same numbers
"""

from dataclasses import dataclass

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import elasticdl.elastic.lightning  # noqa: F401  registers the strategy


@dataclass(frozen=True)
class Config:
    words: int = 32
    length: int = 24
    width: int = 48
    heads: int = 4
    layers: int = 2


class Sequences(Dataset):
    """Each word follows from the two before it, but for one in ten."""

    def __init__(self, config, number, seed):
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(config.words, (number, config.length + 1), generator=generator)
        random = torch.rand(text.shape, generator=generator) < 0.1
        for i in range(2, config.length + 1):
            follows = (3 * text[:, i - 1] + text[:, i - 2] + 1) % config.words
            text[:, i] = torch.where(random[:, i], text[:, i], follows)
        self.text = text

    def __len__(self):
        return len(self.text)

    def __getitem__(self, index):
        return {"input_ids": self.text[index, :-1], "labels": self.text[index, 1:]}


class LanguageModel(L.LightningModule):
    def __init__(self, config, lr=3e-3):
        super().__init__()
        self.config, self.lr = config, lr
        self.words = nn.Embedding(config.words, config.width)
        self.places = nn.Embedding(config.length, config.width)
        layer = nn.TransformerEncoderLayer(
            config.width, config.heads, 4 * config.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.head = nn.Linear(config.width, config.words)

    def forward(self, input_ids):
        length = input_ids.shape[1]
        hidden = self.words(input_ids) + self.places(torch.arange(length, device=self.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=self.device)
        return self.head(self.layers(hidden, mask=mask, is_causal=True))

    def loss(self, batch):
        return cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main(folder="lightning_logs", strategy="elastic", steps=80, callbacks=(), **options):
    L.seed_everything(0)
    config = Config()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=steps,
        val_check_interval=20,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version="words"),
        callbacks=[ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=40, save_top_k=-1), *callbacks],
        **options,
    )
    train_loader = DataLoader(Sequences(config, 800, seed=1), batch_size=32, shuffle=True)
    trainer.fit(LanguageModel(config), train_loader, DataLoader(Sequences(config, 128, seed=2), batch_size=64))
    return trainer


if __name__ == "__main__":
    main()
