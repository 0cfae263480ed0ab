"""A whole training script as people write it, made elastic: docs/whole_script.md shows the lines that make it so.

python examples/whole_script.py --out out                                        # alone
elasticdl run --num_workers 2-4 -- python examples/whole_script.py --out out     # elastically
"""

import argparse
import math
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split
from tqdm import tqdm

import elasticdl.elastic.torch as elastic


def read_arguments():
    parser = argparse.ArgumentParser(description="Learn to read handwritten digits.")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the log and the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from --out, if there is a checkpoint")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--warm_up", type=int, default=20, help="steps until the learning rate is reached")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where that does no harm")
    return parser.parse_args()


def make_loaders(batch_size):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train_set, test_set = random_split(data, [1500, 297], torch.Generator().manual_seed(0))
    return DataLoader(train_set, batch_size, shuffle=True), DataLoader(test_set, batch_size)


def make_model():
    body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.AvgPool2d(2))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.GELU(), nn.Linear(64, 10))


def make_schedule(optimizer, warm_up, total):
    """Up along a line, then down along a cosine."""

    def factor(step):
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total - warm_up)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class Log:
    """The numbers of each step, once: in log.csv, and for TensorBoard."""

    def __init__(self, folder):
        # Imported here, as it imports TensorFlow, if that is installed, which has to come after PyTorch's compiler.
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.make_board = folder, SummaryWriter
        self.file = self.board = None

    def begin(self, step, names):
        """What is there of this step and later ones was written by a run that has ended since: it goes."""
        path = self.folder / "log.csv"
        rows = path.read_text().splitlines()[1:] if path.exists() else []
        rows = [row for row in rows if int(row.split(",")[0] or step) < step]
        path.write_text("\n".join([",".join(["step", *names]), *rows, ""]))
        self.file = path.open("a")
        self.board = self.make_board(self.folder, purge_step=step)

    def write(self, step, **numbers):
        if self.file is None:
            self.begin(step, numbers)
        self.file.write(",".join([str(step), *(f"{each:.9g}" for each in numbers.values())]) + "\n")
        self.file.flush()
        for name, each in numbers.items():
            self.board.add_scalar(name, each, step)
        self.board.flush()


def save(content, path):
    """The file is never half written."""
    torch.save(content, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


@torch.no_grad()
def evaluate(model, loader, device):
    """Loss and accuracy over the whole data set."""
    model.eval()
    loss = hits = samples = 0
    for images, labels in loader:
        output, labels = model(images.to(device)), labels.to(device)
        loss += cross_entropy(output, labels, reduction="sum").item()
        hits += (output.argmax(1) == labels).sum().item()
        samples += len(labels)
    model.train()
    return loss / samples, hits / samples


def main():
    args = read_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader, test_loader = make_loaders(args.batch_size)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9, weight_decay=1e-4)
    scheduler = make_schedule(optimizer, args.warm_up, args.epochs * len(loader))
    values = elastic.values(step=0, best=0.0)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "values": values}
    log, first = Log(args.out), 0
    if args.resume and (args.out / "last.pt").exists():
        saved = torch.load(args.out / "last.pt", map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["epoch"]
    model, optimizer, loader, values = elastic.prepare(model, optimizer, loader, values, start_epoch=first)

    for epoch in range(first, args.epochs):
        bar = tqdm(loader, f"epoch {epoch + 1}")
        for images, labels in bar:
            images, labels = images.to(device), labels.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                output = model(images)
                loss = cross_entropy(output, labels)
                hits = (output.argmax(1) == labels).float().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            numbers = {"loss": elastic.mean(loss), "hits": elastic.mean(hits)}
            optimizer.step()
            values.step += 1
            elastic.on_one(log.write, values.step, **numbers, norm=norm.item(), rate=scheduler.get_last_lr()[0])
            scheduler.step()
            bar.set_postfix(numbers)
        loss, accuracy = evaluate(model, test_loader, device)
        print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.3f} of the test set")
        if accuracy > values.best:
            values.best = accuracy
            elastic.on_one(save, model.state_dict(), args.out / "best.pt")
        states = {name: part.state_dict() for name, part in parts.items()}
        elastic.on_one(save, {**states, "epoch": epoch + 1}, args.out / "last.pt")


if __name__ == "__main__":
    main()
