"""A Keras module in training: what is done when, whatever becomes of the world, with worlds that follow a script."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from refusal_kit import refused
from worker_kit import KERAS_MODULE, ScriptedMaster, function, make_job, spec_maker, trained

import keras  # isort: skip

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import Stopped
from elasticdl.elastic.keras import driver
from elasticdl.worker.check import check


@pytest.fixture
def make_spec(tmp_path, monkeypatch):
    """40 samples in batches of 10: four steps an epoch."""
    return spec_maker(tmp_path, monkeypatch, KERAS_MODULE, global_batch_size=10, num_epochs=3)


def callbacks(*lines):
    """A module's ``callbacks()`` that returns these expressions; ``journal`` is a list that they may fill."""
    return JOURNAL + f"\ndef callbacks():\n    return [{', '.join(lines)}]\n"


JOURNAL = """
journal = []


class Journal(keras.callbacks.Callback):
    best = 0

    def __getattribute__(self, name):
        if not name.startswith("on_") or name in ("on_batch_begin", "on_batch_end"):
            return super().__getattribute__(name)
        return lambda *arguments: journal.append((name, *(dict(a) if isinstance(a, dict) else a for a in arguments)))


class StopAt(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            self.model.stop_training = True


class Halve(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2
"""


def journal_of(job, hook):
    journal = __import__(job.spec.model_def).journal
    return [call[1:] for call in journal if call[0] == hook]


def test_callbacks_are_told_what_fit_tells_them(make_spec):
    """Once, also of steps around which the world changes, or that are made again."""
    spec = make_spec(callbacks("Journal()"), num_epochs=2)
    job = trained(spec, ScriptedMaster(leave_after={2, 4, 8}), {("elasticdl.step", 3)})
    assert journal_of(job, "on_train_begin") == [({},)]
    assert journal_of(job, "on_epoch_begin") == [(0, {}), (1, {})]
    for hook in ("on_train_batch_begin", "on_train_batch_end"):
        assert [batch for batch, _ in journal_of(job, hook)] == [0, 1, 2, 3] * 2
    losses = [report.loss for report in job.script.reports]
    told = [logs["loss"] for _, logs in journal_of(job, "on_train_batch_end")]
    so_far = [losses[first : first + count] for first in (0, 4) for count in (1, 2, 3, 4)]
    assert told == pytest.approx([np.mean(each) for each in so_far])
    (_, first), (_, second) = journal_of(job, "on_epoch_end")
    assert first.keys() == {"loss", "val_loss", "val_error"}
    of_tests = [{k[4:]: v for k, v in logs.items() if k != "loss"} for logs in (first, second)]
    assert journal_of(job, "on_test_end") == [(logs,) for logs in of_tests]
    assert journal_of(job, "on_test_batch_begin") == [(0, {})] * 2  # 10 samples, in one batch
    assert journal_of(job, "on_train_end") == [(second,)]
    assert job.learner.callbacks[-1].callbacks[0].params == {"verbose": 0, "epochs": 2, "steps": 4}


def test_what_is_written_for_the_whole_job_is_written_by_rank_0(make_spec, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr("requests.post", lambda url, *arguments, **named: sent.append(url))

    def written(rank):
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        lines = [
            f"keras.callbacks.ModelCheckpoint({str(folder / 'best.keras')!r}, save_best_only=True)",
            f"keras.callbacks.CSVLogger({str(folder / 'log.csv')!r})",
            "keras.callbacks.RemoteMonitor('http://monitor')",
        ]
        make_job(make_spec(callbacks(*lines), num_epochs=2), ScriptedMaster(rank=rank, size=2)).trainer.run()
        return {path.name for path in folder.iterdir()}

    assert written(0) == {"best.keras", "log.csv"}
    assert sent == ["http://monitor/publish/epoch/end/"] * 2
    assert written(1) == set()
    assert len(sent) == 2


ON_RANK_0 = {"ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "ProgbarLogger", "OrbaxCheckpoint"}


def test_for_each_of_keras_s_callbacks_it_is_known_where_it_runs():
    everywhere = {"Callback", "EarlyStopping", "History", "LambdaCallback", "LearningRateScheduler", "CallbackList"}
    everywhere |= {"ReduceLROnPlateau", "SwapEMAWeights", "TerminateOnNaN"}
    there = {
        name
        for name, found in vars(keras.callbacks).items()
        if isinstance(found, type) and issubclass(found, keras.callbacks.Callback)
    }
    assert {kind.__name__ for kind in driver.ON_RANK_0} == ON_RANK_0 & there
    assert there <= ON_RANK_0 | everywhere | {"BackupAndRestore"}, "one that is new in Keras: where should it run?"


# -- the end, and the learning rate --


def test_a_callback_of_rank_0_ends_training_after_the_step_that_it_has_seen(make_spec):
    job = trained(make_spec(callbacks("StopAt(1)")))
    assert (job.script.last_word.step, job.script.last_word.epochs) == (2, 0)
    assert [entry["step"] for entry in job.script.notices("evaluation")] == [2]
    other = trained(make_spec(callbacks("StopAt(1)")), ScriptedMaster(rank=1, size=2))
    assert other.script.last_word.step == 12


def test_early_stopping_exports_the_best_weights(make_spec, tmp_path):
    stopping = "keras.callbacks.EarlyStopping('val_loss', min_delta=100.0, patience=1, restore_best_weights=True)"
    job = trained(make_spec(callbacks(stopping), num_epochs=50, output=str(tmp_path / "out")))
    finished = job.script.last_word
    assert finished.epochs == 2  # the second was no better by so much
    # As with Keras's own history, the metrics are of the last epoch and not of the weights that were put back.
    assert dict(finished.metrics) == job.script.notices("evaluation")[-1]["metrics"]
    exported = keras.models.load_model(tmp_path / "out" / "model.keras")
    served, inputs = tf.saved_model.load(str(tmp_path / "out" / "saved_model")), np.ones((3, 2), np.float32)
    np.testing.assert_allclose(served.serve(inputs), exported(inputs), rtol=1e-6)
    best = trained(make_spec(num_epochs=1))
    for ours, theirs in zip(exported.weights, best.learner.state.model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_of_a_metric_that_keras_does_not_know_the_direction_is_asked_for_before_training(make_spec):
    accuracy = function("eval_metrics_fn()", "return {'accuracy': lambda labels, outputs: next(rising)}")
    rising = "\nrising = iter((0.2, 0.4, 0.3, 0.1, 0.0))\n"
    with pytest.raises(UserError, match=r'EarlyStopping\(monitor="val_accuracy"\): give mode="max"') as error:
        check(make_spec(callbacks("keras.callbacks.EarlyStopping('val_accuracy')") + accuracy))
    assert "\n" not in str(error.value)
    stopping = callbacks("keras.callbacks.EarlyStopping('val_accuracy', patience=2, mode='max')")
    assert trained(make_spec(stopping + accuracy + rising, num_epochs=9)).script.last_word.epochs == 4


DECAY = "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8)"


@pytest.mark.parametrize(
    ("given", "left", "expected"),
    [
        (["Halve()"], {6}, [0.1, 0.05, 0.025]),  # at the end of each epoch
        # A schedule that takes the rate so far is asked once an epoch in effect.
        ([DECAY, "Halve()"], {5, 6}, [0.08, 0.032, 0.0128]),
    ],
)
def test_the_rate_that_a_callback_sets_stays_in_force(make_spec, given, left, expected):
    job = trained(make_spec(callbacks(*given), minibatch_size=10), ScriptedMaster(leave_after=left))
    assert [report.learning_rate for report in job.script.reports] == pytest.approx(
        [rate for rate in expected for _ in range(4)]
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [(DECAY, "LearningRateScheduler sets"), ("Halve()", r"on_epoch_end\(\) of one of Keras's sets")],
    ids=["known", "own"],
)
def test_a_callback_that_sets_a_rate_that_goes_by_rules_is_refused(make_spec, given, said):
    spec = make_spec(callbacks(given), minibatch_size=10, learning_rate_scaling="linear")
    refused(f"{said} the learning rate, which goes by --learning_rate_scaling", partial(trained, spec))


def test_resumes_with_the_same_patience(make_spec, tmp_path):
    waiting = callbacks("keras.callbacks.EarlyStopping('val_loss', min_delta=100.0, patience=2)")
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "num_epochs": 9}
    with pytest.raises(Stopped):
        trained(make_spec(waiting, **kept), ScriptedMaster(stop_after=6))
    assert trained(make_spec(waiting, **kept)).script.last_word.epochs == 3


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
    np.testing.assert_array_equal(make_job(spec).weights(), make_job(spec).weights())  # on every worker the same
    job = trained(spec)
    assert job.script.last_word.step == 4
    assert isinstance(job.learner.state.optimizer, keras.optimizers.SGD)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.keras", "saved_model"}
