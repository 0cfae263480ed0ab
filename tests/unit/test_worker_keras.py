"""A Keras module in training: what its callbacks are told and may do, whatever becomes of the world; and its models."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from elastic_kit import Board, in_threads
from keras_benches import KerasTrainee, make_model
from refusal_kit import refused
from worker_kit import KERAS_MODULE, Training, function, spec_maker

import keras  # isort: skip

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.keras import driver
from elasticdl.elastic.keras.tensorflow_adapter import prepare_devices
from elasticdl.worker.check import check
from elasticdl.worker.learner import build_model
from elasticdl.worker.zoo import load_module


@pytest.fixture
def make_spec(tmp_path, monkeypatch):
    """40 samples in batches of 10: four steps an epoch."""
    return spec_maker(tmp_path, monkeypatch, KERAS_MODULE, global_batch_size=10, num_epochs=3)


def callbacks(*lines):
    """A module's ``callbacks()`` that returns these expressions."""
    return JOURNAL + f"\ndef callbacks():\n    return [{', '.join(lines)}]\n"


JOURNAL = """
journal = {}


class Journal(keras.callbacks.Callback):
    best = 0

    def __getattribute__(self, name):
        if not name.startswith("on_") or name in ("on_batch_begin", "on_batch_end"):
            return super().__getattribute__(name)
        calls = journal.setdefault(id(self), [])
        return lambda *arguments: calls.append((name, *(dict(a) if isinstance(a, dict) else a for a in arguments)))


class Halve(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2
"""


def test_callbacks_are_told_what_fit_tells_them(make_spec):
    """Once, also of steps around which the world changes, or that are made again."""
    events = {**{(0, step): "moved" for step in (2, 4, 8)}, (1, 3): "torn"}
    made = Training(make_spec(callbacks("Journal()"), num_epochs=2), events, workers=2)
    callback = made.learner.callbacks[-1].callbacks[0]
    calls = __import__(made.spec.model_def).journal[id(callback)]

    def told(hook):
        return [call[1:] for call in calls if call[0] == hook]

    assert told("on_train_begin") == [({},)]
    assert told("on_epoch_begin") == [(0, {}), (1, {})]
    for hook in ("on_train_batch_begin", "on_train_batch_end"):
        assert [batch for batch, _ in told(hook)] == [0, 1, 2, 3] * 2
    losses = [report.loss for report in made.line.reports]
    so_far = [losses[first : first + count] for first in (0, 4) for count in (1, 2, 3, 4)]
    assert [logs["loss"] for _, logs in told("on_train_batch_end")] == pytest.approx([np.mean(each) for each in so_far])
    (_, first), (_, second) = told("on_epoch_end")
    assert first.keys() == {"loss", "val_loss", "val_error"}
    of_tests = [{k[4:]: v for k, v in logs.items() if k != "loss"} for logs in (first, second)]
    assert told("on_test_end") == [(logs,) for logs in of_tests]
    assert told("on_test_batch_begin") == [(0, {})] * 2  # its half of 10 samples, in one batch
    assert told("on_train_end") == [(second,)]
    assert callback.params == {"verbose": 0, "epochs": 2, "steps": 4}


def test_what_is_written_for_the_whole_job_is_written_by_rank_0(make_spec, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr("requests.post", lambda url, *arguments, **named: sent.append(url))
    Training(make_spec(callbacks("keras.callbacks.RemoteMonitor('http://monitor')"), num_epochs=2), workers=2)
    assert sent == ["http://monitor/publish/epoch/end/"] * 2


def test_for_each_of_keras_s_callbacks_it_is_known_where_it_runs():
    everywhere = {"Callback", "EarlyStopping", "History", "LambdaCallback", "LearningRateScheduler", "CallbackList"}
    everywhere |= {"ReduceLROnPlateau", "SwapEMAWeights", "TerminateOnNaN"}
    there = {name for name, found in vars(keras.callbacks).items() if isinstance(found, type)}
    known = {"BackupAndRestore"}.union(everywhere, (kind.__name__ for kind in driver.ON_RANK_0))
    assert there <= known, "one that is new in Keras: where should it run?"


# -- the end, and the learning rate --


def test_early_stopping_exports_the_best_weights(make_spec, tmp_path):
    stopping = "keras.callbacks.EarlyStopping('val_loss', min_delta=100.0, patience=1, restore_best_weights=True)"
    made = Training(make_spec(callbacks(stopping), num_epochs=50, output=str(tmp_path / "out")))
    finished = made.line.last_word
    assert finished.epochs == 2  # the second was no better by so much
    # As with Keras's own history, the metrics are of the last epoch and not of the weights that were put back.
    assert dict(finished.metrics) == made.line.notices("evaluation")[-1]["metrics"]
    exported = keras.models.load_model(tmp_path / "out" / "model.keras")
    served, inputs = tf.saved_model.load(str(tmp_path / "out" / "saved_model")), np.ones((3, 2), np.float32)
    np.testing.assert_allclose(served.serve(inputs), exported(inputs), rtol=1e-6)
    best = Training(make_spec(num_epochs=1))
    for ours, theirs in zip(exported.weights, best.learner.state.model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_of_a_metric_that_keras_does_not_know_the_direction_is_asked_for_before_training(make_spec):
    accuracy = function("eval_metrics_fn()", "return {'accuracy': lambda labels, outputs: 1}")
    stopping = callbacks("keras.callbacks.EarlyStopping('val_accuracy')")
    refused(r'EarlyStopping\(monitor="val_accuracy"\): give mode="max"', lambda: check(make_spec(stopping + accuracy)))


DECAY = "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8)"


@pytest.mark.parametrize(
    ("given", "said"),
    [(DECAY, "LearningRateScheduler sets"), ("Halve()", r"on_epoch_end\(\) of one of Keras's sets")],
    ids=["known", "own"],
)
def test_a_callback_that_sets_a_rate_that_goes_by_rules_is_refused(make_spec, given, said):
    spec = make_spec(callbacks(given), minibatch_size=10, learning_rate_scaling="linear")
    refused(f"{said} the learning rate, which goes by --learning_rate_scaling", partial(Training, spec))


def test_resumes_with_the_same_patience(make_spec, tmp_path):
    waiting = callbacks("keras.callbacks.EarlyStopping('val_loss', min_delta=100.0, patience=2)")
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "num_epochs": 9}
    Training(make_spec(waiting, **kept), {(0, 6): "stopped"})
    assert Training(make_spec(waiting, **kept)).line.last_word.epochs == 3


# -- models --


SUBCLASSED = """
class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


def custom_model(compiled=False):
    model = Net()
    if compiled:
        model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    return model
"""


@pytest.mark.parametrize("params", ["", "compiled=True"])
def test_a_subclassed_model_is_built_on_the_first_sample_compiled_or_not(make_spec, params, tmp_path):
    spec = make_spec(SUBCLASSED, model_params=params, num_epochs=1, output=str(tmp_path / "out"))
    made = Training(spec)
    assert made.line.last_word.step == 4
    assert isinstance(made.learner.state.optimizer, keras.optimizers.SGD)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.keras", "saved_model"}


# -- devices, features by name, mixed precision --


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
