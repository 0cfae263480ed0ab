"""Lightning's own trainer, loops and metrics."""

import os
import time

import lightning
import torch

import elasticdl.elastic.lightning  # noqa: F401

SLOW = os.environ.get("TEST_SLOW_WHILE", "")
torch.manual_seed(0)
x = torch.randn(160, 4)
y = x.sum(1, keepdim=True)


def wait():
    """Between two steps, while somebody is to come between."""
    if SLOW and os.path.exists(SLOW):
        time.sleep(0.1)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        wait()
        loss = ((self.layer(batch[0]) - batch[1]) ** 2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


module = Module()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(strategy="elastic", accelerator="cpu", max_epochs=6, **quiet)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
trainer.fit(module, loader)
if module.global_rank == 0:
    values = [round(value, 4) for each in module.parameters() for value in each.flatten().tolist()]
    print("final", trainer.global_step, round(float(trainer.callback_metrics["loss"]), 4), values)
