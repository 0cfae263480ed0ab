"""A loss that is no mean over samples is named before anything is trained: parts of a batch do not make the whole."""

import keras
import numpy as np
import pytest
import torch
from elastic_fit_kit import BATCH, Fitting, data_of, dense, numbers
from session_kit import FakeMaster

from elasticdl.common.errors import UserError
from elasticdl.worker.torch_learner import couplings

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
def test_what_fit_is_told_of_a_loss(make, said, monkeypatch):
    told = FakeMaster()
    fitting = Fitting(make(), data_of(X, Y), most=BATCH)
    fitting.context.session = told.session
    monkeypatch.setattr(type(fitting.context), "worker_id", 0)  # the first tells it for all
    lines = fitting.fit._step.couplings
    assert [said in line for line in lines] == ([True] if said else [])
    fitting.context.tell_couplings(lines)
    assert len(told.notices("warning")) == len(lines)


class Observer(keras.layers.Layer):
    """Keeps what ``of`` makes of a batch and of what it has kept."""

    def __init__(self, of, dtype):
        super().__init__()
        self.of, self.kind = of, dtype

    def build(self, shape):
        self.kept = self.add_weight(name="kept", shape=(), dtype=self.kind, initializer="zeros", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.kept.assign(keras.ops.cast(self.of(self.kept.value, inputs), self.kind))
        return inputs


def rows_in(inputs):
    return keras.ops.shape(inputs)[0]


SUM, LARGEST = "moves by more for more samples", "keeps the largest value of a batch"
OBSERVED = [
    (lambda kept, x: 0.9 * kept + 0.1 * keras.ops.mean(x), "float32", ""),
    (lambda kept, x: 0.9 * kept + keras.ops.sum(keras.ops.cast(x[:, 0] > 0, "float32")), "float32", SUM),
    (lambda kept, x: keras.ops.maximum(kept, keras.ops.max(x)), "float32", LARGEST),
    (lambda kept, x: kept + 1.0, "float32", ""),
    (lambda kept, x: keras.ops.cast(kept + 1, "int64"), "int64", ""),
    (lambda kept, x: kept + keras.ops.cast(rows_in(x), "int64"), "int64", ""),
    (
        lambda kept, x: keras.ops.maximum(kept, keras.ops.cast(100 * keras.ops.max(keras.ops.abs(x)), "int64")),
        "int64",
        LARGEST,
    ),
]


@pytest.mark.parametrize(("of", "dtype", "said"), OBSERVED)
def test_what_fit_is_told_of_what_a_layer_keeps(of, dtype, said):
    model = dense(Observer(of, dtype))
    lines = Fitting(model, data_of(X, Y)).fit._step.couplings
    assert [said in line and "/kept " in line for line in lines] == ([True] if said else [])
    assert all(float(np.max(np.abs(each))) == 0 for each in model.non_trainable_variables)


def test_a_mean_of_what_is_drawn_or_normalized_is_no_sum():
    of = OBSERVED[0][0]
    others = (keras.layers.BatchNormalization(), Observer(of, "float32"), keras.layers.Dropout(0.5))
    assert not Fitting(dense(*others, Observer(of, "float32")), data_of(X, Y)).fit._step.couplings


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest_error")
        self.kept = self.add_variable(shape=(), initializer="zeros", name="kept")

    def update_state(self, labels, outputs, sample_weight=None):
        self.kept.assign(keras.ops.maximum(self.kept, keras.ops.max(keras.ops.abs(labels - outputs))))

    def result(self):
        return self.kept


def test_a_metric_that_keeps_no_sum_is_refused():
    with pytest.raises(UserError, match=r"the metric largest_error \(Largest\) can't be put together") as error:
        Fitting(dense(metrics=["mae", Largest()]), data_of(X, Y))
    assert "\n" not in str(error.value)


def test_a_metric_of_a_batch_is_named_once():
    def worst(labels, outputs):
        return keras.ops.max(keras.ops.abs(labels - outputs))

    (line,) = Fitting(dense(metrics=["mae", "cosine_similarity", worst]), data_of(X, Y)).fit._step.couplings
    assert line.startswith("the metric worst depends on the number of workers")


class Kept(torch.nn.Module):
    def __init__(self, of, dtype):
        super().__init__()
        self.of = of
        self.register_buffer("kept", torch.zeros((), dtype=dtype))

    def forward(self, inputs):
        if self.training:
            self.kept = self.of(self.kept, inputs.detach()).to(self.kept.dtype)
        return inputs


def entropy(labels, outputs, **options):
    return torch.nn.functional.cross_entropy(outputs, labels, **options)


def mean_of(kept, inputs):
    return 0.9 * kept + 0.1 * inputs.mean()


@pytest.mark.parametrize(
    ("loss", "of", "dtype", "said"),
    [
        (entropy, mean_of, torch.float32, ""),
        (entropy, lambda kept, x: kept + len(x), torch.int64, ""),
        (lambda labels, outputs: entropy(labels, outputs, reduction="sum"), mean_of, torch.float32, "no mean"),
        (entropy, lambda kept, x: 0.9 * kept + (x[:, 0] > 0).sum(), torch.float32, f"the buffer 0.kept {SUM}"),
        (entropy, lambda kept, x: torch.maximum(kept, x.max()), torch.float32, f"the buffer 0.kept {LARGEST}"),
    ],
)
def test_what_a_zoo_module_is_told(loss, of, dtype, said):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(5, generator=generator), number % 3) for number in range(8)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(Kept(of, dtype), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3), torch.nn.Dropout(0.5))
    lines = couplings(model, loss, data, torch.device("cpu"))
    assert [said in line for line in lines] == ([True] if said else [])
    assert not model[0].kept
    assert not model[1].num_batches_tracked
