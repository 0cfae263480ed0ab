"""Trainings of one small model, each by another front end, which look the same alone and as a job.

    trained.py plain | library | lightning | trainer FOLDER

Rank 0 adds a line to FOLDER/curve after each step, and writes FOLDER/end. While FOLDER/slow is there a step takes longer, the more so
the later it is: what a test waits for comes before the last step.
"""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

folder = Path(sys.argv[2])
torch.manual_seed(0)
x = torch.randn(160, 4)
y = x.sum(1, keepdim=True)
data = TensorDataset(x, y)
EPOCHS, BATCH = 6, 8


def made(step, *values):
    with (folder / "curve").open("a") as curve:
        curve.write(" ".join(f"{float(value):.6g}" for value in (step, *values)) + "\n")


def wait(step):
    if (folder / "slow").exists():
        time.sleep(min(2.0, 0.05 * 1.05**step))


def ended(model, *values):
    parameters = [round(value, 4) for each in model.parameters() for value in each.flatten().tolist()]
    (folder / "end").write_text(f"{parameters} {values}")


def plain():
    """With processes that load data."""
    import elasticdl.elastic.torch as elastic

    loader = DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer, loader = elastic.prepare(model, optimizer, loader)
    step = 0
    for epoch in range(EPOCHS):
        for number, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = ((model(inputs) - labels) ** 2).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            step += 1
            mean = elastic.mean(loss)
            if elastic.rank() == 0:
                made(step, epoch, number, len(loader), mean, scheduler.get_last_lr()[0])
                print(f"step {step} loss {mean:.4f}")
            if not elastic.catching_up():
                wait(step)
        scheduler.step()
    if elastic.rank() == 0:
        ended(model)


def library():
    """With a schedule and a value of its own."""
    import elasticdl.elastic.torch as elastic

    elastic.init(global_batch_size=BATCH)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
    loader = elastic.DataLoader(data)
    state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader, scheduler=scheduler, seen=0)

    @elastic.run
    def train(state):
        for _ in state.loader.epochs(EPOCHS):
            for batch in state.loader:
                for inputs, labels in batch:
                    batch.backward(((model(inputs) - labels) ** 2).mean())
                optimizer.step()
                scheduler.step()
                state.seen += 1
                if elastic.rank() == 0:
                    made(state.step, state.loss, state.learning_rate)
                wait(state.step)
                state.commit()

    train(state)
    if elastic.rank() == 0:
        ended(model, state.seen)


def lightning():
    """With validation, a log and checkpoints; goes on from FOLDER/begun.ckpt if it is there."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    import elasticdl.elastic.lightning  # noqa: F401

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def loss_of(self, batch):
            return ((self.layer(batch[0]) - batch[1]) ** 2).mean()

        def training_step(self, batch, number):
            loss = self.loss_of(batch)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, number):
            self.log("val_loss", self.loss_of(batch))

        def on_train_batch_end(self, *_):
            if self.trainer.is_global_zero:
                made(self.global_step, self.current_epoch, self.trainer.callback_metrics["loss_step"])
            wait(self.global_step)

        def predict_step(self, batch, number):
            return self.layer(batch[0])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    module = Module()
    trainer = lightning.Trainer(
        strategy="elastic",
        accelerator="cpu",
        max_epochs=EPOCHS,
        log_every_n_steps=1,
        logger=CSVLogger(folder, name="", version="log"),
        callbacks=[ModelCheckpoint(folder / "kept", filename="{epoch}", monitor="val_loss", save_top_k=2)],
        enable_progress_bar=False,
    )
    begun, whole = folder / "begun.ckpt", DataLoader(data, batch_size=50)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    trainer.fit(module, loader, whole, ckpt_path=begun if begun.exists() else None)
    predicted = float(torch.cat(trainer.predict(module, whole)).sum())
    if trainer.is_global_zero:
        kept = sorted(path.name for path in (folder / "kept").iterdir())
        metrics = {name: round(float(value), 4) for name, value in sorted(trainer.callback_metrics.items())}
        ended(module, trainer.global_step, trainer.current_epoch, metrics, kept, round(predicted, 2))


def trainer():
    """Looks for its own latest checkpoint, as Hugging Face's examples do."""
    from transformers import TrainerCallback, TrainingArguments

    from elasticdl.elastic.transformers import Trainer

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x, labels=None):
            outputs = self.layer(x)
            return {"loss": ((outputs - labels) ** 2).mean(), "logits": outputs}

    class Observer(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.is_world_process_zero:
                made(state.global_step, state.epoch)
            wait(state.global_step)

    out = folder / "out"
    out.mkdir(exist_ok=True)
    quiet = {"report_to": [], "use_cpu": True, "logging_steps": 1, "eval_strategy": "epoch"}
    saves = {"save_strategy": "steps", "save_steps": 7, "save_total_limit": 1}
    size = {"per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "learning_rate": 0.01}
    rows = [{"x": one, "labels": other} for one, other in zip(x, y, strict=True)]
    ours = Trainer(
        model=Model(),
        args=TrainingArguments(output_dir=str(out), **size, **saves, **quiet),
        train_dataset=rows,
        eval_dataset=rows[:50],
        callbacks=[Observer()],
    )
    ours.train(resume_from_checkpoint=any(out.glob("checkpoint-*")))
    if ours.is_world_process_zero():
        logged = [(row["step"], round(row.get("loss", row.get("eval_loss", 0.0)), 4)) for row in ours.state.log_history]
        ended(ours.model, ours.state.global_step, logged, [path.name for path in out.iterdir()])


if __name__ == "__main__":
    {"plain": plain, "library": library, "lightning": lightning, "trainer": trainer}[sys.argv[1]]()
