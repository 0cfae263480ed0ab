"""The evaluation of a Keras model: each sample once, and what callbacks are told of it."""

from types import SimpleNamespace

import elastic_keras_kit
import numpy as np
import pytest
from elastic_keras_kit import Board, SumOfThreads, run_all

import keras  # isort: skip

from elasticdl.common.errors import UserError
from elasticdl.worker.keras_learner import KerasEvaluator, name_metrics


class Told:
    """What an evaluation tells of its batches."""

    def __init__(self):
        self.hooks = []

    def __call__(self, hook, batch, logs):
        self.hooks.append((hook.removeprefix("on_test_batch_"), batch, *logs.values()))


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
        context=SimpleNamespace(collective=SumOfThreads(rank, board), advance=lambda activity: None),
    )


@pytest.mark.parametrize(("workers", "samples"), [(1, 7), (2, 7), (3, 2), (5, 17)])
def test_each_sample_counts_once_on_any_number_of_members(workers, samples):
    data, board = Two(samples), Board(workers)
    metrics = {
        "in_order": lambda labels, outputs: np.array_equal(labels, np.arange(samples)),
        "same": {"first": lambda labels, outputs: outputs[:, 0], "mae": keras.metrics.MeanAbsoluteError},
    }
    members = [evaluator(rank, board, metrics, data) for rank in range(workers)]
    results = run_all(members, lambda member: member.evaluate(Told()))
    assert all(result == results[0] for result in results)
    found = results[0].metrics
    expected = members[0].model({"a": data.inputs, "b": data.inputs[:, :1]})
    assert results[0].samples == samples
    assert found["in_order"] == 1.0
    assert found["loss"] == pytest.approx(
        float(np.mean((np.array(expected["sum"])[:, 0] - np.arange(samples)) ** 2)), rel=1e-5
    )
    assert found["same_first"] == pytest.approx(float(data.inputs[:, 0].mean()), abs=1e-6)
    assert found["same_mae"] == pytest.approx(float(np.abs(data.inputs[:, 0] - np.arange(samples)).mean()), rel=1e-5)


def test_metrics_that_cannot_be_told_apart_or_are_no_numbers_are_refused():
    def refused(metrics):
        with pytest.raises(UserError) as caught:
            evaluator(0, Board(1), metrics, Two(4)).evaluate(Told())
        return str(caught.value)

    assert refused({"other": {"a": len}}) == "eval_metrics_fn(): there is no output 'other'; the model has sum, same"
    assert refused({"odd": lambda labels, outputs: "x"}) == "eval_metrics_fn(): odd is no number but str"


def test_a_keras_metric_starts_anew_with_each_evaluation():
    member = evaluator(0, Board(1), {"same": {"mae": keras.metrics.MeanAbsoluteError}}, Two(9))
    assert member.evaluate(Told()) == member.evaluate(Told())


def test_each_member_tells_of_its_own_batches_and_of_no_others():
    data, board = Two(11), Board(2)
    members = [evaluator(rank, board, {}, data) for rank in range(2)]  # shares of 6 and 5 samples, by threes
    told = [Told() for _ in members]
    results = run_all(list(zip(members, told, strict=True)), lambda pair: pair[0].evaluate(pair[1]))
    assert [each[:2] for each in told[0].hooks] == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]
    assert [each[:2] for each in told[1].hooks] == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]
    ends = [each.hooks[-1][2] for each in told]  # the mean over all of the member's samples
    assert (ends[0] * 6 + ends[1] * 5) / 11 == pytest.approx(results[0].metrics["loss"], rel=1e-6)


def test_a_member_without_samples_tells_nothing():
    board = Board(2)
    members = [evaluator(rank, board, {}, Two(1)) for rank in range(2)]
    told = [Told() for _ in members]
    run_all(list(zip(members, told, strict=True)), lambda pair: pair[0].evaluate(pair[1]))
    assert [len(each.hooks) for each in told] == [2, 0]


def test_what_a_metric_raises_is_the_user_s_own_error():
    def odd(labels, outputs):
        raise KeyError("a mistake in the metric")

    with pytest.raises(KeyError, match="a mistake in the metric"):
        evaluator(0, Board(1), {"odd": odd}, Two(4)).evaluate(Told())
