"""Hugging Face's trainer, which looks for its own latest checkpoint, as its examples do."""

import os
import sys
import time

import torch
from transformers import TrainingArguments

from elasticdl.elastic.transformers import Trainer

SLOW = os.environ.get("TEST_SLOW_WHILE", "")
torch.manual_seed(0)
x = torch.randn(160, 4)
y = x.sum(1, keepdim=True)


def wait():
    """Between two steps, while somebody is to come between."""
    if SLOW and os.path.exists(SLOW):
        time.sleep(0.1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        wait()
        outputs = self.layer(x)
        return {"loss": ((outputs - labels) ** 2).mean(), "logits": outputs}


folder = sys.argv[1]
quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1000}
saves = {"save_strategy": "steps", "save_steps": 10, "save_total_limit": 1}
size = {"per_device_train_batch_size": 8, "num_train_epochs": 6, "learning_rate": 0.01}
trainer = Trainer(
    model=Model(),
    args=TrainingArguments(output_dir=folder, **size, **saves, **quiet),
    train_dataset=[{"x": one, "labels": other} for one, other in zip(x, y, strict=True)],
)
trainer.train(resume_from_checkpoint=any(name.startswith("checkpoint-") for name in os.listdir(folder)))
if trainer.is_world_process_zero():
    values = [round(value, 4) for each in trainer.model.parameters() for value in each.flatten().tolist()]
    print("final", trainer.state.global_step, values)
