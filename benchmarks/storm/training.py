"""What every storm must leave as it was: each step's loss, and the samples of each epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.processes import Failed
from benchmarks.sample_records import consumed
from benchmarks.storm.zoo import watched_softmax
from elasticdl.elastic.core.plan import epoch_order
from elasticdl.job.journal import Entry

BATCH = 60
STEPS_PER_EPOCH = watched_softmax.SAMPLES // BATCH
ROUNDING = 1e-4  # of a loss, relative


class Wrong(Failed):
    """The training is not what it would have been: a worker crashed, a step or a sample was lost, repeated or different."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """``largest_difference``: of any loss that any worker has seen, relative."""

    steps: int
    epochs: int
    samples: int
    losses_compared: int
    largest_difference: float


def undisturbed(epochs: int) -> list[float]:
    """The loss of every step as PyTorch alone makes them: one process, whole batches, only the order is the job's."""
    torch.set_num_threads(1)  # for what is as small as this, several only wait for one another
    inputs, labels = watched_softmax.dataset("training", "").tensors
    model = watched_softmax.custom_model()
    optimizer = watched_softmax.optimizer(model.parameters())
    found = []
    for epoch in range(epochs):
        order = torch.from_numpy(epoch_order(len(inputs), 0, epoch))
        for batch in order.split(BATCH):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            loss = watched_softmax.loss(labels[batch], model(inputs[batch]))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(loss.item())
    return found


def compare(losses: Iterable[Path], records: Iterable[Path], epochs: int) -> Agreement:
    """``losses``: what `watched_softmax` wrote; ``records``: what `--sample_record` did."""
    count, difference = _compare_losses(losses, undisturbed(epochs))
    _compare_samples(records, epochs)
    return Agreement(epochs * STEPS_PER_EPOCH, epochs, epochs * watched_softmax.SAMPLES, count, difference)


def check_journal(journal: Iterable[Entry]) -> None:
    """That no worker crashed, and the state was never lost."""
    newest = 0
    for entry in journal:
        match entry["event"]:
            case "worker_left" if entry["cause"] == "crashed":
                raise Wrong(f"worker {entry['worker']} crashed: {entry['reason']}")
            case "resumed":
                raise Wrong(f"the state was lost: training went on from {entry['path']}")
            case "world_formed":
                if entry["step"] < newest - 1:  # one step may be known to a single worker only, which then dies
                    raise Wrong(f"world {entry['world']} went back to step {entry['step']} from step {newest}")
                newest = max(newest, entry["step"])


def _compare_losses(files: Iterable[Path], expected: Sequence[float]) -> tuple[int, float]:
    missing, count, worst = set(range(1, len(expected) + 1)), 0, 0.0
    for path in files:
        before = 0
        for line in path.read_text().splitlines():
            step, loss = int(line.split()[0]), float(line.split()[1])
            if step <= before:
                raise Wrong(f"worker {path.name} made step {step} after step {before}")
            if step > len(expected):
                raise Wrong(f"worker {path.name} made step {step}, and there are {len(expected)}")
            before, right = step, expected[step - 1]
            apart = abs(loss - right) / abs(right)
            if not apart <= ROUNDING:
                raise Wrong(f"the loss of step {step} at worker {path.name} is {loss}, undisturbed {right}")
            missing.discard(step)
            count, worst = count + 1, max(worst, apart)
    if missing:
        raise Wrong(f"{len(missing)} steps were never made, the first is {min(missing)}")
    return count, worst


def _compare_samples(records: Iterable[Path], epochs: int) -> None:
    found = consumed(records)
    for epoch in sorted({*range(epochs), *found}):
        counts, every = found.get(epoch, Counter()), range(watched_softmax.SAMPLES if epoch < epochs else 0)
        if counts != Counter(every):
            lost, extra = set(every) - set(counts), sum(counts.values()) - len(counts)
            raise Wrong(f"epoch {epoch}: {len(lost)} samples were never used, and {extra} uses were one too many")
