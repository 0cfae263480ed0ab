"""The models and the data for all that trains with PyTorch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.utils.data import TensorDataset

from benchmarks.experiments.zoo.pace import at_pace
from benchmarks.models import CLASSES, LAYERS, RESNET20, RESNET50, TINY, TRANSFORMER, worker_batch
from model_zoo.cifar10 import resnet20_torch

IMAGE = (3, 32, 32)  # as CIFAR-10 has them
TOKENS, WORDS, WIDTH = 32, 1000, 128  # of a sample of the transformer's


def make_model(name: str) -> torch.nn.Module:
    """Always the same initial weights. It takes the time of a simulated GPU, if the environment says so."""
    return at_pace(_make_bare(name), free_first_step=False)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_dataset(name: str, samples: int) -> TensorDataset:
    """Random samples in memory, so that reading never decides a measurement."""
    generator = torch.Generator().manual_seed(1)
    if name == RESNET20:
        values = IMAGE[0] * IMAGE[1] * IMAGE[2]
        row = torch.randn(values + samples - 1, generator=generator)
        images = row.unfold(0, values, 1).view(samples, *IMAGE)  # windows of one row: as many as wanted, in no memory
    elif name == TRANSFORMER:
        images = torch.randint(0, WORDS, (samples, TOKENS), generator=generator)
    elif name in (RESNET50, TINY):
        images = torch.arange(samples) % (2 * worker_batch(name))  # the numbers of images that the model has
    else:
        images = torch.randn(samples, LAYERS[name][0], generator=generator)
    return TensorDataset(images, torch.randint(0, CLASSES, (samples,), generator=generator))


def warm_up(name: str, device: torch.device | None = None) -> None:
    """Pay what a process pays for its first step (imports, memory, thread pools), on a model that is thrown away."""
    model = _make_bare(name).to(device)
    optimizer = make_optimizer(model)
    images, labels = (each.to(device) for each in make_dataset(name, worker_batch(name)).tensors)
    torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _make_bare(name: str) -> torch.nn.Module:
    """At no pace. A perceptron has about as many parameters as its name says."""
    torch.manual_seed(0)
    if name == RESNET20:
        return resnet20_torch.custom_model()
    if name == TRANSFORMER:
        return _Transformer()
    if name in (RESNET50, TINY):
        return _OnDevice(name)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(LAYERS[name]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class _Transformer(torch.nn.Module):
    """Classifies sequences of tokens: 0.9 M parameters in 51 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.classes = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        classes: torch.Tensor = self.classes(self.layers(self.words(tokens)).mean(dim=1))
        return classes


class _OnDevice(torch.nn.Module):
    """transformers' ResNet-50 in bf16, which is given numbers of images that are on the device: no loader of either loop's decides.

    As torchvision's it has 25,557,032 parameters. The tiny one has a quarter of the width, and one block a stage.
    """

    def __init__(self, name: str) -> None:
        from transformers import ResNetConfig, ResNetForImageClassification

        super().__init__()
        stem, blocks, pixels = (16, [1, 1, 1, 1], 32) if name == TINY else (64, [3, 4, 6, 3], 224)
        widths = [4 * stem << stage for stage in range(len(blocks))]
        config = ResNetConfig(embedding_size=stem, hidden_sizes=widths, depths=blocks, num_labels=1000)
        self.resnet = ResNetForImageClassification(config).to(memory_format=torch.channels_last)
        images = torch.randn(2 * worker_batch(name), 3, pixels, pixels).to(memory_format=torch.channels_last)
        self.register_buffer("images", images, persistent=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        images = self.get_buffer("images")
        with torch.autocast(images.device.type, torch.bfloat16):
            classes: torch.Tensor = self.resnet(images[numbers]).logits
        return classes.float()
