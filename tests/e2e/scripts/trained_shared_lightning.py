"""As `trained_shared.py`, by a Trainer of Lightning, with validation, a log and checkpoints.

trained_shared_lightning.py fsdp | tensor FOLDER
"""

import os
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.lightning as elastic

kind, folder, size = sys.argv[1], Path(sys.argv[2]), int(os.environ.get("WORLD_SIZE", 1))
is_fsdp, is_shared = kind == "fsdp", size > 1
torch.manual_seed(0)
x = torch.randn(154, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        width = 7 if is_fsdp else 8  # FSDP takes shards that are not equal
        self.model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def configure_model(self):
        if is_shared and is_fsdp:
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.model[0], mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif is_shared:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)

    def loss_of(self, batch):
        return ((self.model(batch[0]) - batch[1]) ** 2).mean()

    def training_step(self, batch, number):
        loss = self.loss_of(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", self.loss_of(batch))

    def on_train_batch_end(self, *_):
        if self.trainer.is_global_zero:
            with (folder / "curve").open("a") as curve:
                loss, rate = self.trainer.callback_metrics["loss_step"], self.lr_schedulers().get_last_lr()[0]
                curve.write(f"{self.global_step} {float(loss):.8g} {rate:.6g}\n")
        if (folder / "slow").exists():
            time.sleep(min(2.0, 0.05 * 1.05**self.global_step))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, foreach=False)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)]


module, strategy = Module(), "elastic"
if is_shared:
    sizes = (size, 1) if is_fsdp else (1, size)
    strategy = elastic.ElasticModelParallelStrategy(*sizes)
trainer = lightning.Trainer(
    strategy=strategy,
    accelerator="cpu",
    devices=size,
    max_epochs=6,
    log_every_n_steps=1,
    logger=False,
    use_distributed_sampler=False,
    callbacks=[ModelCheckpoint(folder / "kept", filename="{epoch}", monitor="val_loss", save_top_k=2)],
    gradient_clip_val=2.0 if is_fsdp else None,
    enable_progress_bar=False,
)
# The last batch of an epoch has fewer samples than some worlds have processes.
trainer.fit(module, DataLoader(data, batch_size=9, shuffle=True), DataLoader(data, batch_size=50))
whole = [getattr(each, "full_tensor", each.detach)() for each in module.parameters()]
if trainer.is_global_zero:
    kept = sorted(each.name for each in (folder / "kept").iterdir())
    (folder / "end").write_text(
        str([round(value, 4) for each in whole for value in each.flatten().tolist()]) + str(kept)
    )
