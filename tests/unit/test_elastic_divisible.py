"""A loss that is no mean over samples is named before anything is trained: parts of a batch do not make the whole."""

import keras
import numpy as np
import pytest
import torch
from elastic_fit_kit import BATCH, Fitting, data_of, dense, numbers
from session_kit import FakeMaster

from elasticdl.elastic.training.divisible import why_no_mean
from elasticdl.worker.torch_learner import coupling

X, Y = numbers()


def root_of_mean(labels, predictions):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(labels - predictions)))


class SumOfSquares(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(keras.ops.sum(keras.ops.square(inputs)))
        return inputs


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (dense, ""),
        (lambda: dense(loss="huber"), ""),
        (lambda: dense(keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")), ""),
        (lambda: dense(keras.layers.BatchNormalization()), ""),
        (lambda: dense(loss=root_of_mean), "the loss is no mean over samples: of the first two together it is"),
        (lambda: dense(loss=lambda a, b: keras.ops.sum(keras.ops.square(a - b))), "the loss is no mean over samples"),
        (lambda: dense(loss=keras.losses.Dice()), "the loss is no mean over samples"),
        (lambda: dense(SumOfSquares()), "the loss is no mean over samples"),
        (lambda: dense(keras.layers.BatchNormalization(synchronized=True)), "normalizes by each worker's part"),
    ],
    ids=["mse", "huber", "regularizers", "norm", "rmse", "sum", "dice", "add_loss", "synchronized"],
)
def test_what_fit_is_told_of_a_loss(make, said):
    told = FakeMaster()
    fitting = Fitting(make(), data_of(X, Y), most=BATCH)
    fitting.context.session = told.session
    told.session.core.worker_id = 0  # the first tells it for all
    lines = fitting.fit._step.couplings
    assert [said in line for line in lines] == ([True] if said else [])
    fitting.context.tell_couplings(lines)
    assert len(told.notices("warning")) == len(lines)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda labels, outputs: torch.nn.functional.cross_entropy(outputs, labels), ""),
        (lambda labels, outputs: torch.nn.functional.cross_entropy(outputs, labels, reduction="sum"), "no mean"),
        (lambda labels, outputs: torch.sqrt(torch.nn.functional.mse_loss(outputs[:, 0], labels.float())), "no mean"),
    ],
)
def test_what_a_zoo_module_is_told_of_a_loss(loss, said):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, generator=generator), number % 3) for number in range(4)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Dropout(0.5))
    assert said in coupling(model, loss, data, torch.device("cpu"))
    assert bool(coupling(model, loss, data, torch.device("cpu"))) == bool(said)


def test_what_is_no_number_is_not_judged():
    assert why_no_mean(lambda labels, outputs: float("nan"), np.zeros(2), np.zeros(2)) == ""
