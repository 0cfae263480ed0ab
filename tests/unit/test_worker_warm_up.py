"""The warm-up pass really runs, and leaves nothing behind."""

import random

import numpy as np
import pytest
import torch

from elasticdl.job.spec import JobSpec
from elasticdl.worker.batch_sizes import largest_micro_batch
from elasticdl.worker.torch_learner import warm_up


class Samples:
    """Draws from every global generator, as augmentation does."""

    def __getitem__(self, index):
        return torch.rand(3) + np.random.rand() + random.random(), torch.tensor([1.0])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        self.register_buffer("calls", torch.tensor(0))
        self.seen = []

    def forward(self, inputs):
        self.calls += 1
        self.seen.append(inputs.shape)
        return self.layers(inputs).sum(dim=1, keepdim=True)


def draws():
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    yield
    yield random.random(), np.random.rand(), torch.rand(1).item()


def warmed(model, loss):
    warm_up(model, loss, Samples(), 6, torch.device("cpu"))


def test_leaves_no_trace():
    model, gradients = Model(), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, expected = draws()
    model.layers[0].weight.register_hook(gradients.append)
    next(drawn := draws())
    warmed(model, torch.nn.functional.mse_loss)
    assert next(drawn) == expected
    assert model.seen == [(6, 3)]
    assert len(gradients) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_cleans_up_also_when_the_users_code_raises():
    model = Model()
    with pytest.raises(KeyError):
        warmed(model, lambda labels, predictions: {}["no"])
    assert int(model.calls) == 0


@pytest.mark.parametrize(
    ("options", "samples", "expected"),
    [
        ({"global_batch_size": 100, "max_worker_batch_size": 30}, 1000, 30),
        ({"global_batch_size": 100, "num_workers": "3-4"}, 1000, 34),
        ({"minibatch_size": 20}, 1000, 20),
        ({"minibatch_size": 20, "max_worker_batch_size": 8}, 1000, 8),
        ({}, 1000, 64),
        ({}, 10, 10),
    ],
)
def test_runs_as_many_samples_as_training_will(options, samples, expected):
    assert largest_micro_batch(JobSpec(**options), samples) == expected
