"""The evaluation of a Keras model: each sample once, and what callbacks are told of it."""

import elastic_keras_kit
import numpy as np
import pytest
from elastic_keras_kit import Board, SumOfThreads, run_all
from session_kit import JobStub

import keras  # isort: skip

from elasticdl.common.errors import UserError
from elasticdl.worker.keras_learner import KerasEvaluator, name_metrics


class Two(elastic_keras_kit.Samples):
    """Inputs by name, labels that are numbered."""

    def __getitem__(self, index):
        return {"a": self.inputs[index], "b": self.inputs[index][:1]}, index


def two_outputs():
    keras.utils.set_random_seed(0)
    a, b = keras.Input((8,), name="a"), keras.Input((1,), name="b")
    return keras.Model({"a": a, "b": b}, {"sum": keras.layers.Dense(1)(a), "same": keras.layers.Identity()(b)})


def evaluator(rank, board, metrics, data):
    return KerasEvaluator(
        model=two_outputs(),
        dataset=data,
        loss=lambda labels, outputs: keras.ops.square(outputs["sum"][:, 0] - keras.ops.cast(labels, "float32")),
        metrics=name_metrics(metrics),
        batch_size=3,
        context=JobStub(collective=SumOfThreads(rank, board), advance=lambda activity: None),
    )


def evaluated(workers, data, metrics):
    """Of each member its model, what it has found, and what it has told of its batches."""
    board = Board(workers)
    members = [evaluator(rank, board, metrics, data) for rank in range(workers)]

    def evaluate(member):
        told = []
        result = member.evaluate(lambda hook, batch, logs: told.append((hook[14:], batch, *logs.values())))
        return result, told

    results, told = zip(*run_all(members, evaluate), strict=True)
    assert all(result == results[0] for result in results)
    return members[0].model, results[0], told


@pytest.mark.parametrize(("workers", "samples"), [(1, 7), (3, 2), (5, 17)])
def test_each_sample_counts_once_on_any_number_of_members(workers, samples):
    data = Two(samples)
    metrics = {
        "in_order": lambda labels, outputs: np.array_equal(labels, np.arange(samples)),
        "same": {"first": lambda labels, outputs: outputs[:, 0], "mae": keras.metrics.MeanAbsoluteError},
    }
    model, result, _ = evaluated(workers, data, metrics)
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
        evaluated(1, Two(4), metrics)


def test_a_keras_metric_starts_anew_with_each_evaluation():
    member = evaluator(0, Board(1), {"same": {"mae": keras.metrics.MeanAbsoluteError}}, Two(9))
    first, second = (member.evaluate(lambda *_: None) for _ in range(2))
    assert first == second


def test_each_member_tells_of_its_own_batches_and_of_no_others():
    _, result, told = evaluated(2, Two(11), {})  # shares of 6 and 5 samples, by threes
    for each in told:
        assert [hook[:2] for hook in each] == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]
    ends = [each[-1][2] for each in told]  # the mean over all of the member's samples
    assert (ends[0] * 6 + ends[1] * 5) / 11 == pytest.approx(result.metrics["loss"], rel=1e-6)
    _, _, told = evaluated(2, Two(1), {})
    assert [len(each) for each in told] == [2, 0]  # without samples nothing
