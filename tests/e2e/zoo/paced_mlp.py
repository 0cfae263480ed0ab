"""Real digits on a small MLP whose computing sleeps: some seconds for each sample, and some for each micro-batch, which more
workers don't make less."""

import time

import torch
from torch import nn

from model_zoo.digits.data import BRIGHTEST, read_digits


class Paced(nn.Module):
    def __init__(self, sample_seconds, fixed_seconds):
        super().__init__()
        self._layers = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self._sample_seconds, self._fixed_seconds = sample_seconds, fixed_seconds

    def forward(self, inputs):
        if self.training:
            time.sleep(self._fixed_seconds + self._sample_seconds * len(inputs))
        return self._layers(inputs)


def custom_model(sample_seconds=0.001, fixed_seconds=0.0):
    return Paced(sample_seconds, fixed_seconds)


def loss(labels, predictions):
    return nn.functional.cross_entropy(predictions, labels)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def dataset(mode, path):
    images, labels = read_digits()
    return torch.utils.data.TensorDataset(torch.tensor(images / BRIGHTEST, dtype=torch.float32), torch.tensor(labels))
