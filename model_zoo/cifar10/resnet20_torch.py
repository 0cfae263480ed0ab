"""ResNet20 for CIFAR-10 (He et al. 2015, section 4.2): 0.27 M parameters, shortcuts without parameters.

    elasticdl train --model_zoo model_zoo --model_def cifar10.resnet20_torch --minibatch_size 128 --num_workers 2-4 \
        --num_epochs 90 --training_data cifar-10-python.tar.gz --validation_data cifar-10-python.tar.gz

The learning rate follows the number of workers (see `callbacks`), so the batch has to as well: use
``--minibatch_size``, not ``--global_batch_size``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import Dataset

from . import recipe
from .archive import open_split
from .recipe import LEARNING_RATE, PADDING, learning_rate

MEAN = torch.tensor(recipe.MEAN).view(3, 1, 1)
DEVIATION = torch.tensor(recipe.DEVIATION).view(3, 1, 1)


class Block(nn.Module):
    """Two convolutions around which the input is carried unchanged (option A: subsampled, new channels zero)."""

    def __init__(self, channels: int, features: int) -> None:
        super().__init__()
        self.stride = features // channels
        self.new_channels = features - channels
        self.conv1 = nn.Conv2d(channels, features, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(features)
        self.conv2 = nn.Conv2d(features, features, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(features)

    def forward(self, inputs: Tensor) -> Tensor:
        carried = inputs[:, :, :: self.stride, :: self.stride]
        before = self.new_channels // 2
        carried = functional.pad(carried, (0, 0, 0, 0, before, self.new_channels - before))
        hidden = functional.relu(self.norm1(self.conv1(inputs)))
        return functional.relu(carried + self.norm2(self.conv2(hidden)))


def custom_model() -> nn.Module:
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]  # nine blocks from one width to the next
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *(Block(channels, features) for channels, features in pairwise(widths)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def loss(labels: Tensor, predictions: Tensor) -> Tensor:
    return functional.cross_entropy(predictions, labels)


def optimizer(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
    return optim.Adam(parameters, lr=LEARNING_RATE)


def eval_metrics_fn() -> dict[str, Callable[[Tensor, Tensor], float]]:
    return {"accuracy": accuracy}


def accuracy(labels: Tensor, outputs: Tensor) -> float:
    """The share of samples whose largest output is at the label."""
    hits = torch.as_tensor(outputs).argmax(dim=1) == torch.as_tensor(labels)
    return hits.double().mean().item()


def callbacks() -> list[object]:
    """The learning rate by epoch, times the number of workers (a fixed batch per worker is assumed)."""
    # Imported here, so that the model can be used where there is no Horovod.
    import horovod.torch as hvd

    from elasticdl.callbacks import LearningRateScheduler

    def schedule(epoch: int) -> float:
        return learning_rate(epoch) * float(hvd.size())

    return [LearningRateScheduler(schedule)]


class Cifar10(Dataset[tuple[Tensor, int]]):
    """Normalised 3x32x32 images and labels 0..9.

    With `augment`, each access gives another random crop (of the image with a margin) and flip, drawn from
    torch's global generator.
    """

    def __init__(self, images: Tensor, labels: Tensor, augment: bool) -> None:
        self.images, self.labels, self.augment = images, labels.tolist(), augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        return ((_augmented(image) if self.augment else image) - MEAN) / DEVIATION, self.labels[index]


def _augmented(image: Tensor) -> Tensor:
    places = 2 * PADDING + 1
    draw = int(torch.randint(2 * places * places, ()))  # one draw for flip, top and left: draws cost more than the rest
    flip, place = divmod(draw, places * places)
    top, left = divmod(place, places)
    cropped = functional.pad(image, (PADDING,) * 4)[:, top : top + 32, left : left + 32]
    return cropped.flip(2) if flip else cropped


def dataset(mode: str, path: str) -> Cifar10:
    """The training batches, augmented, or the test batch of the CIFAR-10 at `path`.

    Raises:
        ValueError: `mode` is unknown, or there is no whole CIFAR-10 at `path`.
    """
    images, labels = open_split(mode, path)
    return Cifar10(torch.from_numpy(images), torch.from_numpy(labels), augment=mode == "training")
