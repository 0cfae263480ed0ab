"""What is around the training of a Keras module: devices, features by name, mixed precision, and the evaluation."""

import os

import numpy as np
import pytest
from elastic_kit import Board, SumOfThreads, in_threads

import keras  # isort: skip

import tensorflow as tf
from keras_benches import KerasTrainee, Samples, make_model
from session_kit import JobStub
from worker_kit import KERAS_MODULE, Training, function, spec_maker

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors, prepare_devices
from elasticdl.worker.check import check
from elasticdl.worker.keras_learner import KerasEvaluator, name_metrics
from elasticdl.worker.learner import build_model
from elasticdl.worker.zoo import load_module


class Two(Samples):
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
        context=JobStub(collective=SumOfThreads(rank, board, TensorFlowTensors()), advance=lambda activity: None),
    )


def evaluated(workers, data, metrics):
    """Of each member its model, what it has found, and what it has told of its batches."""
    board = Board(workers)
    members = [evaluator(rank, board, metrics, data) for rank in range(workers)]

    def evaluate(member):
        told = []
        member.evaluate(lambda *_: None)  # which leaves nothing behind
        result = member.evaluate(lambda hook, batch, logs: told.append((hook[14:], batch, *logs.values())))
        return result, told

    results, told = zip(*in_threads(evaluate, members), strict=True)
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


def test_each_member_tells_of_its_own_batches_and_of_no_others():
    _, result, told = evaluated(2, Two(11), {})  # shares of 6 and 5 samples, by threes
    for each in told:
        assert [hook[:2] for hook in each] == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]
    ends = [each[-1][2] for each in told]  # the mean over all of the member's samples
    assert (ends[0] * 6 + ends[1] * 5) / 11 == pytest.approx(result.metrics["loss"], rel=1e-6)
    _, _, told = evaluated(2, Two(1), {})
    assert [len(each) for each in told] == [2, 0]  # without samples nothing


GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"


@pytest.fixture
def make_spec(tmp_path, monkeypatch):
    return spec_maker(tmp_path, monkeypatch, KERAS_MODULE, global_batch_size=10, num_epochs=3)


def test_gpus_are_set_up_before_a_module_builds_its_model_and_never_once_they_are_used(make_spec, monkeypatch):
    growth, happened, is_used = dict.fromkeys(("GPU:0", "GPU:1")), [], []

    def set_growth(gpu, enable):
        if is_used:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        growth[gpu] = enable
        happened.append(f"growth of {gpu}")

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: list(growth))
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", growth.get)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", set_growth)
    module = load_module(make_spec(function("custom_model()", "return happened.append('model')")))
    module.custom_model.__globals__["happened"] = happened
    build_model(module, 0)
    assert happened == ["growth of GPU:0", "growth of GPU:1", "model"]
    is_used.append(True)
    growth["GPU:0"] = None
    prepare_devices()
    assert len(happened) == 3


def test_the_environment_says_so_before_anything_of_the_module_is_imported(make_spec, monkeypatch):
    monkeypatch.delenv(GROWTH, raising=False)
    tell = f"\nimport os\ntold = os.environ.get('{GROWTH}')\n"
    with pytest.raises(UserError, match="told: true"):
        check(make_spec(tell + function("custom_model()", "raise ValueError(f'told: {told}')")))
    monkeypatch.setenv(GROWTH, "false")
    load_module(make_spec())
    assert os.environ[GROWTH] == "false", "what the user has set stays"


DICTS = """

plain = dataset


class Named(Samples):
    def __getitem__(self, index):
        inputs, labels = super().__getitem__(index)
        return {"image": inputs}, labels


def dataset(mode, path):
    return Named(40, 1) if mode == "training" else Named(10, 2)


def custom_model():
    inputs = keras.Input((2,), name="x")
    return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(inputs))
"""


def test_trains_and_evaluates_as_without_the_dict(make_spec):
    results = []
    for extra in (DICTS, DICTS + "\n\ndataset = plain\n"):
        spec = make_spec(extra, num_epochs=1)
        check(spec)
        job = Training(spec)
        results.append(([report.loss for report in job.line.reports], job.line.evaluations))
    assert results[0] == results[1]
    assert results[0][0]


@pytest.fixture(params=["mixed_float16", "mixed_bfloat16"])
def policy(request):
    before = keras.config.dtype_policy()
    keras.mixed_precision.set_global_policy(request.param)
    yield request.param
    keras.mixed_precision.set_global_policy(before)


@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_a_step_that_overflows_is_skipped_by_all_members(policy):
    """No gradient in half precision of a loss that is scaled by so much at first is finite."""
    board = Board(2)

    def make(rank):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**24, 5)
        return KerasTrainee(rank, board, BatchPolicy(16, None), make_model(), optimizer)

    one, other = members = [make(rank) for rank in range(2)]
    in_threads(lambda member: member.train(epochs=6), members)
    assert one.state.step == 24
    assert 0 < int(one.optimizer.iterations) < 24
    assert all(map(np.array_equal, one.weights(), other.weights()))
    assert all(np.isfinite(value).all() for value in one.weights())
    assert not np.array_equal(one.model.get_weights()[0], make_model().get_weights()[0])


def test_a_module_that_sets_a_policy_is_trained_with_it(policy, tmp_path, make_spec):
    spec = make_spec(f"\nkeras.mixed_precision.set_global_policy({policy!r})\n")

    def of_policy(**options):
        return Training(spec.model_copy(update=options))

    kept = {"checkpoint_dir": str(tmp_path / "kept")}
    job = of_policy(num_epochs=2, output=str(tmp_path / "out"), **kept)
    optimizer = job.learner.state.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    assert [report.learning_rate for report in job.line.reports] == pytest.approx([0.1] * 8)
    assert all(np.isfinite(report.loss) for report in job.line.reports)
    assert keras.models.load_model(tmp_path / "out" / "model.keras").compute_dtype == policy.removeprefix("mixed_")
    resumed, whole = of_policy(**kept), of_policy()
    assert resumed.line.notices("resumed")[0]["step"] == 8
    ours, theirs = (each.learner.state.optimizer.variables for each in (resumed, whole))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)  # the scale's own state among them
