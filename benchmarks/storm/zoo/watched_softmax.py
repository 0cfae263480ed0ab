"""A softmax regression whose workers write every loss down, and are as slow as the storm wants them.

`$WATCHED` is a folder of the storm's, which all workers see:

    slow         while it is there, each step takes the seconds that are written in it
    losses/N     a line `STEP LOSS` for each step that worker N has made; of its process I other than 0 in losses/N.I
    pids/N.I     the number of process I of worker N, if it has several
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.nn import functional

from elasticdl.callbacks import Callback, Logs

SAMPLES, FEATURES, CLASSES = 12_000, 8, 4
PIDS = "pids"
_folder = Path(os.environ.get("WATCHED", "/nowhere"))


def custom_model() -> torch.nn.Module:
    """Convex and from zero: rounding, which depends on who adds up what, does not grow from step to step."""
    model = torch.nn.Linear(FEATURES, CLASSES)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def loss(labels: torch.Tensor, predictions: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(predictions, labels)


def optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5)


def dataset(mode: str, path: str) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    truth = torch.randn(FEATURES, CLASSES, generator=generator)
    noise = torch.randn(SAMPLES, CLASSES, generator=generator)
    labels = (inputs @ truth + noise).argmax(1)
    cut = slice(None) if mode == "training" else slice(200)
    return torch.utils.data.TensorDataset(inputs[cut], labels[cut])


def write_pid(process: str) -> None:
    new = _folder / f"{os.getpid()}.new"
    new.write_text(str(os.getpid()))
    new.replace(_folder / PIDS / f"{os.environ['ELASTICDL_WORKER_ID']}.{process}")


class Watched(Callback):
    def __init__(self, process: str = "0") -> None:
        self._suffix = "" if process == "0" else f".{process}"

    def on_train_begin(self) -> None:
        worker = os.environ["ELASTICDL_WORKER_ID"]
        self._losses = os.open(_folder / "losses" / f"{worker}{self._suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_train_batch_end(self, step: int, logs: Logs) -> None:
        os.write(self._losses, f"{step} {logs['loss']!r}\n".encode())  # whole, or not at all
        with contextlib.suppress(FileNotFoundError):
            time.sleep(float((_folder / "slow").read_text()))

    def on_train_end(self) -> None:
        os.close(self._losses)


def callbacks() -> list[Callback]:
    return [Watched()]
