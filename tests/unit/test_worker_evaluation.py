"""Every sample of the evaluation set counts once, however it is shared out."""

import numpy as np
import pytest
import torch
from elastic_kit import Board, SumOfThreads, in_threads
from keras_benches import Samples
from refusal_kit import refused
from session_kit import JobStub
from torch.utils.data import TensorDataset

import keras  # isort: skip

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors
from elasticdl.elastic.torch_kit.tensors import TorchTensors
from elasticdl.worker.keras_learner import KerasEvaluator, name_metrics
from elasticdl.worker.torch_learner import TorchEvaluator


def data(samples):
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(samples, 2, generator=generator), torch.arange(samples))


def squared(labels, outputs):
    return (outputs.sum(dim=1) - labels).square().mean()


def make_evaluator(collective, dataset, batch_size=4, model=None, advance=lambda activity: None, metrics=None):
    in_order = {
        "labels_in_order": lambda labels, outputs: float(torch.equal(labels, torch.arange(len(dataset)))),
        "inputs_in_order": lambda labels, outputs: float(torch.equal(outputs, dataset.tensors[0])),
    }
    return TorchEvaluator(
        model=model or torch.nn.Identity(),
        dataset=dataset,
        loss=squared,
        metrics=in_order if metrics is None else metrics,
        batch_size=batch_size,
        context=JobStub(collective=collective, device=torch.device("cpu"), advance=advance),
    )


def alone(**changes):
    return make_evaluator(Collective(TorchTensors()), data(10), **changes).evaluate()


@pytest.mark.parametrize(("workers", "samples"), [(1, 7), (2, 17), (5, 1), (5, 17)])
def test_exact_for_every_share(workers, samples):
    dataset, board = data(samples), Board(workers)
    members = [make_evaluator(SumOfThreads(rank, board), dataset, batch_size=3) for rank in range(workers)]
    results = in_threads(TorchEvaluator.evaluate, members)
    assert all(result == results[0] for result in results)
    exact = pytest.approx(float(squared(dataset.tensors[1], dataset.tensors[0])), rel=1e-5)
    assert results[0].samples == samples
    assert results[0].metrics == {"labels_in_order": 1.0, "inputs_in_order": 1.0, "loss": exact}


def test_runs_in_evaluation_mode_without_a_trace_also_when_the_users_code_raises():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2))
    model[2].eval()  # frozen by the user
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = (alone(model=model, metrics={}) for _ in range(2))
    assert first == second  # dropout would differ
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model.append(Shaped(lambda inputs: {}["no"]))
    with pytest.raises(KeyError):
        alone(model=model)
    assert [module.training for module in (model, *model)] == [True, True, True, False, True]


class Shaped(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def forward(self, inputs):
        return self.shape(inputs)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (lambda inputs: (inputs, inputs), "output must be one tensor, not tuple"),
        (lambda inputs: inputs.mean(), r"one row a sample: 4, but its shape is \(\)"),
        (lambda inputs: inputs[:1], r"one row a sample: 4, but its shape is \(1, 2\)"),
    ],
)
def test_outputs_that_are_not_rows_are_refused(shape, message):
    refused(message, lambda: alone(model=Shaped(shape)))


def test_only_rank_0_computes_the_metrics_and_waits_for_nobody_meanwhile():
    board, said, computed = Board(3), ([], [], []), []

    def evaluate(rank):
        def metric(labels, outputs):
            computed.append((rank, said[0][-1]))
            return float(len(labels))

        told = {"metrics": {"samples": metric}, "advance": said[rank].append}
        return make_evaluator(SumOfThreads(rank, board), data(100), **told).evaluate().metrics["samples"]

    assert in_threads(evaluate, range(3)) == [100.0] * 3
    assert computed == [(0, Activity.ALIVE)]
    assert [each[-2:] for each in said] == [[Activity.WAIT, Activity.ALIVE]] * 3


# -- with Keras: of several outputs, each with metrics of its own --


class Two(Samples):
    """Inputs by name, labels that are numbered."""

    def __getitem__(self, index):
        return {"a": self.inputs[index], "b": self.inputs[index][:1]}, index


def two_outputs():
    keras.utils.set_random_seed(0)
    a, b = keras.Input((8,), name="a"), keras.Input((1,), name="b")
    return keras.Model({"a": a, "b": b}, {"sum": keras.layers.Dense(1)(a), "same": keras.layers.Identity()(b)})


def evaluated_by_keras(workers, data, metrics):
    """The model, and what all members have found."""
    board = Board(workers)

    def evaluator(rank):
        collective = SumOfThreads(rank, board, TensorFlowTensors())
        return KerasEvaluator(
            model=two_outputs(),
            dataset=data,
            loss=lambda labels, outputs: keras.ops.square(outputs["sum"][:, 0] - keras.ops.cast(labels, "float32")),
            metrics=name_metrics(metrics),
            batch_size=3,
            context=JobStub(collective=collective, advance=lambda activity: None),
        )

    members = [evaluator(rank) for rank in range(workers)]
    for _ in range(2):  # the first one leaves nothing behind
        results = in_threads(lambda member: member.evaluate(lambda *_: None), members)
    assert all(result == results[0] for result in results)
    return members[0].model, results[0]


@pytest.mark.parametrize(("workers", "samples"), [(1, 7), (3, 2), (5, 17)])
def test_exact_for_every_share_with_keras(workers, samples):
    data = Two(samples)
    metrics = {
        "in_order": lambda labels, outputs: np.array_equal(labels, np.arange(samples)),
        "same": {"first": lambda labels, outputs: outputs[:, 0], "mae": keras.metrics.MeanAbsoluteError},
    }
    model, result = evaluated_by_keras(workers, data, metrics)
    expected = np.array(model({"a": data.inputs, "b": data.inputs[:, :1]})["sum"])[:, 0]
    assert result.samples == samples
    assert result.metrics == {
        "in_order": 1.0,
        "loss": pytest.approx(float(np.mean((expected - np.arange(samples)) ** 2)), rel=1e-5),
        "same_first": pytest.approx(float(data.inputs[:, 0].mean()), abs=1e-6),
        "same_mae": pytest.approx(float(np.abs(data.inputs[:, 0] - np.arange(samples)).mean()), rel=1e-5),
    }


def fails(labels, outputs):
    raise KeyError("a mistake in the metric")


@pytest.mark.parametrize(
    ("metrics", "error", "words"),
    [
        ({"other": {"a": len}}, UserError, r"eval_metrics_fn\(\): there is no output 'other'; the model has sum, same"),
        ({"odd": lambda labels, outputs: "x"}, UserError, r"eval_metrics_fn\(\): odd is no number but str"),
        ({"odd": fails}, KeyError, "a mistake in the metric"),
    ],
)
def test_metrics_that_cannot_be_told_apart_or_are_no_numbers_are_refused(metrics, error, words):
    with pytest.raises(error, match=words):
        evaluated_by_keras(1, Two(4), metrics)
