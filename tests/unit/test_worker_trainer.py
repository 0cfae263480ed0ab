"""What is done when, exactly once, whatever becomes of the world: of modules for either framework."""

import threading

import numpy as np
import pytest
import torch
from refusal_kit import refused
from worker_kit import KERAS_MODULE, MODULE, Training, function, spec_maker

from elasticdl.callbacks import Callback, LearningRateScheduler
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.job import messages as m
from elasticdl.job.spec import JobSpec
from elasticdl.worker.learner import CHECKPOINT_THREAD, rate_rules


@pytest.fixture
def make_spec(tmp_path, monkeypatch):
    """40 samples in batches of 10: four steps an epoch."""
    return spec_maker(tmp_path, monkeypatch, global_batch_size=10, max_worker_batch_size=4, num_epochs=3)


class Journal(Callback):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *arguments: self.calls.append((name, *arguments))

    def of(self, hook):
        return [call[1:] for call in self.calls if call[0] == hook]


def steps_of(entries):
    return [entry["step"] for entry in entries]


def stopped_in(step, worker=0):
    return {(worker, step): "stopped"}


def moved_in(*steps):
    return {(0, step): "moved" for step in steps}


@pytest.mark.parametrize(
    ("module", "events", "breaks"),
    [
        (MODULE, moved_in(*range(1, 13)), {}),
        (MODULE, {(1, 4): "torn"}, {}),
        (MODULE, {(1, 5): "torn"}, {}),
        (MODULE, {}, {"elasticdl.evaluation": 3}),
        (MODULE, {}, {"elasticdl.complete": 1}),
        (KERAS_MODULE, moved_in(3, 4, 8, 12), {}),
        (KERAS_MODULE, {}, {"elasticdl.complete": 1}),
    ],
)
def test_leaving_and_breaking_worlds_changes_nothing_in_what_is_done(make_spec, module, events, breaks):
    spec = make_spec(module=module, evaluation_steps=2)
    calm, moved = Training(spec, workers=2), Training(spec, events, workers=2, breaks=breaks)
    assert len(moved.job.boards) == len(events) + len(breaks) + 1
    assert moved.line.evaluations == calm.line.evaluations
    assert steps_of(calm.line.evaluations) == [2, 4, 6, 8, 10, 12]
    assert [report.step for report in moved.line.reports] == list(range(1, 13))
    assert [report.step for report in moved.line.reports if report.ends_epoch] == [4, 8, 12]
    assert moved.line.reports[-1].total_samples == 120
    np.testing.assert_array_equal(moved.weights(), calm.weights())


@pytest.mark.parametrize(("most", "evaluated"), [(6, [4, 6]), (4, [4])])
def test_max_step_ends_training_with_an_evaluation(make_spec, tmp_path, most, evaluated):
    made = Training(make_spec(max_step=most, output=str(tmp_path / "out")))
    assert steps_of(made.line.notices("evaluation")) == evaluated
    finished = made.line.last_word
    assert (finished.step, finished.epochs) == (most, 1)
    assert dict(finished.metrics) == made.line.notices("evaluation")[-1]["metrics"]
    assert finished.metrics.keys() == {"loss", "error"}
    saved = torch.load(tmp_path / "out" / "model.pt")
    torch.testing.assert_close(saved, made.learner.state.model.state_dict(), rtol=0, atol=0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.pt"]


def test_callbacks_are_called_once_however_often_the_world_changes(make_spec):
    journals = [[Journal()], [Journal()]]
    spec = make_spec(num_epochs=2, global_batch_size=12)  # batches of 12, 12, 12, 4
    made = Training(spec, {**moved_in(2, 4, 8), (1, 7): "torn"}, workers=2, callbacks=journals)
    for (journal,) in journals:
        assert journal.of("on_train_begin") == [()]
        assert journal.of("on_epoch_begin") == [(0,), (1,)]
        assert [step for step, _ in journal.of("on_train_batch_end")] == list(range(1, 9))
        assert [epoch for epoch, _ in journal.of("on_epoch_end")] == [0, 1]
        assert len(journal.of("on_evaluation_end")) == 2
        assert len(journal.of("on_world_change")) == 5
        assert journal.calls[-1] == ("on_train_end",)
        logs = journal.of("on_epoch_end")[-1][1]
        assert logs.keys() == {"loss", "val_loss", "val_error"}
        losses = [report.loss for report in made.line.reports]
        assert logs["loss"] == pytest.approx((12 * sum(losses[4:7]) + 4 * losses[7]) / 40)


@pytest.mark.parametrize(("options", "steps"), [({}, [12, 8, 4]), ({"checkpoint_steps": 5}, [12, 10, 5])])
def test_a_checkpoint_each_epoch_or_each_so_many_steps_and_at_the_end(make_spec, tmp_path, options, steps):
    def wait(*_):
        """Steps here take a millisecond: without it a checkpoint is left out when the last one is still being written."""
        for thread in threading.enumerate():
            if thread.name == CHECKPOINT_THREAD:
                thread.join(timeout=60)

    waiting = Callback()
    waiting.on_train_batch_end = wait
    spec = make_spec(checkpoint_dir=str(tmp_path / "kept"), keep_checkpoint_max=0, **options)
    assert Training(spec, callbacks=[[waiting]]).kept() == steps


@pytest.mark.parametrize("module", [MODULE, KERAS_MODULE], ids=["torch", "keras"])
def test_resumes_with_the_same_order_optimizer_and_numbers(make_spec, tmp_path, module):
    options = {"checkpoint_dir": str(tmp_path / "kept"), "evaluation_steps": 3, "module": module}
    whole = Training(make_spec(module=module, evaluation_steps=3))
    first, second = Training(make_spec(**options), stopped_in(6)), Training(make_spec(**options))
    assert second.line.notices("resumed")[0]["step"] == 6
    ours, theirs = (
        [(each.step, each.loss, each.total_samples) for each in made.line.reports] for made in (second, whole)
    )
    assert ours == theirs[6:]
    assert (ours[0][0], ours[-1][2]) == (7, 120)
    np.testing.assert_array_equal(second.weights(), whole.weights())
    # The first was told to leave in step 6 and so before its evaluation, which the second made up for.
    assert first.line.evaluations + second.line.evaluations == whole.line.evaluations
    assert steps_of(whole.line.evaluations) == [3, 4, 6, 8, 9, 12]


@pytest.mark.parametrize("module", [MODULE, KERAS_MODULE], ids=["torch", "keras"])
def test_of_both_data_sets_workers_compare_what_they_read(make_spec, module):
    made = Training(make_spec(module=module, num_epochs=1))
    assert {each.role for each in made.learner.state.sources} == {"training data", "evaluation data"}


def test_resuming_what_is_complete_only_exports(make_spec, tmp_path):
    options = {"checkpoint_dir": str(tmp_path / "kept"), "output": str(tmp_path / "out")}
    _, made = (Training(make_spec(**options)) for _ in range(2))
    assert made.line.reports == made.line.notices("checkpoint") == []  # it is there
    assert len(made.line.notices("exported")) == 1
    assert made.line.last_word.metrics["error"] > 0


@pytest.mark.parametrize(
    ("workers", "events", "newest"),
    [
        (1, {(0, 5): "drained"}, 5),
        (1, {(0, 5): m.StopWork("told to", checkpoint=False)}, 4),
        (2, stopped_in(2), 2),
        (2, {(0, 2): "lost", **stopped_in(3, 1)}, 3),
    ],
    ids=["the only one", "the job stops without", "one of two", "who is left"],
)
def test_who_keeps_the_last_state(make_spec, tmp_path, workers, events, newest):
    made = Training(make_spec(checkpoint_dir=str(tmp_path / "kept")), events, workers=workers)
    assert all(made.said), "all were told to leave"
    assert made.kept()[0] == newest
    steps = [told["step"] for line in made.job.lines.values() for told in line.notices("checkpoint")]
    assert steps.count(newest) == 1


TWO_GROUPS = """
def optimizer(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.02}])
"""


@pytest.mark.parametrize(
    ("options", "callbacks", "rules"),
    [
        ({"learning_rate_scaling": "none"}, [Callback()], LearningRate()),
        ({"learning_rate_scaling": "sqrt"}, [], LearningRate(scaling="sqrt")),
        ({"learning_rate_ramp_steps": 5}, [], LearningRate(ramp_steps=5)),
        ({}, [LearningRateScheduler(print), Callback(), LearningRateScheduler(abs)], LearningRate(abs)),
    ],
)
def test_the_rate_follows_options_and_the_last_scheduler(options, callbacks, rules):
    assert rate_rules(JobSpec(minibatch_size=8, **options), callbacks) == rules


LINEAR = function("custom_model()", "return torch.nn.Sequential(torch.nn.Linear(2, 1))")
ADAM = function("optimizer(parameters)", "return torch.optim.Adam(parameters)")
OF_KERAS = {"module": KERAS_MODULE}
KERAS_LINE = function("custom_model()", "return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])")


@pytest.mark.parametrize(
    ("first", "second", "options", "words"),
    [
        ("", ADAM, {}, "the optimizer is of another kind"),
        ("", TWO_GROUPS, {}, "does not fit the optimizer: ValueError"),
        ("", LINEAR, {}, r"checkpoint-0000000006\.pt does not fit: .* key\(s\) in state_dict: "),
        ("", "", {"seed": 7}, "seed was 0 and is 7"),
        ("", "", OF_KERAS, r"holds checkpoints of PyTorch \(checkpoint-000000000[46]\.pt\), and this is a"),
        (OF_KERAS, KERAS_LINE, OF_KERAS, "is of another model: it has 9 variables, and this one has 2"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_in_one_line(make_spec, tmp_path, first, second, options, words):
    kept = {"checkpoint_dir": str(tmp_path / "kept")}
    given = first if isinstance(first, dict) else {"extra": first}
    Training(make_spec(**given, **kept), stopped_in(6))
    refused(words, lambda: Training(make_spec(extra=second, **kept, **options)))


def test_an_unreadable_checkpoint_is_passed_over_for_an_older_one(make_spec, tmp_path):
    kept = {"checkpoint_dir": str(tmp_path / "kept")}
    Training(make_spec(num_epochs=2, **kept))
    newest = tmp_path / "kept" / "checkpoint-0000000008.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    made = Training(make_spec(num_epochs=2, **kept))
    assert made.line.notices("resumed")[0]["step"] == 4
    assert made.kept() == [8, 4]
    for path in (tmp_path / "kept").glob("*.pt"):
        path.write_bytes(b"rubbish")
    refused("can't be read, nor can the 1 older ones: ", lambda: Training(make_spec(**kept)))


def test_an_output_that_cannot_be_written_is_told_in_a_line(make_spec, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=r"--output .*/file/out: the model could not be written: NotADirectoryError"):
        Training(make_spec(num_epochs=1, output=str(tmp_path / "file" / "out")))
