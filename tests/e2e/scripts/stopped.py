"""Trainings of one small model, each by another front end, that go on where they were stopped; slower while a file is there.

    stopped.py plain | library | lightning | trainer FOLDER

Rank 0 says in the end what has become of it; of a plain loop it prints each step.
"""

import os
import sys
import time

import torch

SLOW = os.environ.get("TEST_SLOW_WHILE", "")
torch.manual_seed(0)
x = torch.randn(160, 4)
y = x.sum(1, keepdim=True)
data = torch.utils.data.TensorDataset(x, y)


def wait():
    """Between two steps, while somebody is to come between."""
    if SLOW and os.path.exists(SLOW):
        time.sleep(0.1)


def parameters(model):
    return [round(value, 4) for each in model.parameters() for value in each.flatten().tolist()]


def plain():
    import elasticdl.elastic.torch as elastic

    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    step = 0
    for _ in range(6):
        for inputs, labels in loader:
            loss = ((model(inputs) - labels) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            mean = elastic.mean(loss)
            if elastic.rank() == 0:
                print(f"step {step} loss {mean:.4f}")
            wait()
    if elastic.rank() == 0:
        print("final", parameters(model))


def library():
    """With a schedule and a value of its own, which go on."""
    import elasticdl.elastic.torch as elastic

    elastic.init(global_batch_size=8)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
    loader = elastic.DataLoader(data)
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, seen=0)

    @elastic.run
    def train(state):
        for _ in state.loader.epochs(6):
            for batch in state.loader:
                for inputs, labels in batch:
                    batch.backward(((model(inputs) - labels) ** 2).mean())
                optimizer.step()
                scheduler.step()
                state.seen += 1
                wait()
                state.commit()

    train(state)
    if elastic.rank() == 0:
        print("final", state.seen, parameters(model))


def lightning():
    import lightning

    import elasticdl.elastic.lightning  # noqa: F401

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
    quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lightning.Trainer(strategy="elastic", accelerator="cpu", max_epochs=6, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
    if module.global_rank == 0:
        print("final", trainer.global_step, round(float(trainer.callback_metrics["loss"]), 4), parameters(module))


def trainer(folder):
    """Looks for its own latest checkpoint, as Hugging Face's examples do."""
    from transformers import TrainingArguments

    from elasticdl.elastic.transformers import Trainer

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x, labels=None):
            wait()
            outputs = self.layer(x)
            return {"loss": ((outputs - labels) ** 2).mean(), "logits": outputs}

    os.makedirs(folder, exist_ok=True)
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1000}
    saves = {"save_strategy": "steps", "save_steps": 10, "save_total_limit": 1}
    size = {"per_device_train_batch_size": 8, "num_train_epochs": 6, "learning_rate": 0.01}
    made = Trainer(
        model=Model(),
        args=TrainingArguments(output_dir=folder, **size, **saves, **quiet),
        train_dataset=[{"x": one, "labels": other} for one, other in zip(x, y, strict=True)],
    )
    made.train(resume_from_checkpoint=any(name.startswith("checkpoint-") for name in os.listdir(folder)))
    if made.is_world_process_zero():
        print("final", made.state.global_step, parameters(made.model))


{"plain": plain, "library": library, "lightning": lightning, "trainer": trainer}[sys.argv[1]](*sys.argv[2:])
