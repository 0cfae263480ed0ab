"""What is done when, exactly once, whatever becomes of the world: of either framework, with worlds of one that follow a script."""

import threading

import numpy as np
import pytest
import torch
from refusal_kit import refused
from worker_kit import KERAS_MODULE, MODULE, ScriptedMaster, function, make_job, spec_maker, trained

from elasticdl.callbacks import Callback, LearningRateScheduler
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.protocol import Stopped
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


def stopped(job):
    with pytest.raises(Stopped):
        job.trainer.run()
    return job


def steps_of(entries):
    return [entry["step"] for entry in entries]


STEP, COMPLETE = "elasticdl.step", "elasticdl.complete"


@pytest.mark.parametrize(
    ("module", "left", "failures"),
    [
        *((MODULE, left, set()) for left in ({4}, {12}, set(range(1, 13)))),
        *((MODULE, set(), {way}) for way in ((STEP, 4), (STEP, 5), ("elasticdl.evaluation", 3), (COMPLETE, 1))),
        (KERAS_MODULE, {3, 4, 8, 12}, set()),
        (KERAS_MODULE, set(), {(COMPLETE, 1)}),
    ],
)
def test_leaving_and_breaking_worlds_changes_nothing_in_what_is_done(make_spec, module, left, failures):
    options = {} if failures else {"evaluation_steps": 2}
    calm = trained(make_spec(module=module, **options))
    moved = trained(make_spec(module=module, **options), ScriptedMaster(leave_after=set(left)), failures)
    assert moved.script.worlds == len(left) + len(failures) + 1
    assert moved.script.evaluations == calm.script.evaluations
    if failures == {(STEP, 5)}:  # another member may have lost the world within the evaluation before it
        assert moved.context.collective.done["elasticdl.evaluation"] == 4
    assert steps_of(calm.script.evaluations) == ([4, 8, 12] if failures else [2, 4, 6, 8, 10, 12])  # each of them once
    assert [report.step for report in moved.script.reports] == list(range(1, 13))
    assert [report.step for report in moved.script.reports if report.ends_epoch] == [4, 8, 12]
    assert moved.script.reports[-1].total_samples == 120
    np.testing.assert_array_equal(moved.weights(), calm.weights())
    if module is KERAS_MODULE:
        assert set(moved.learner.state.train_step.traces.values()) == {1}


@pytest.mark.parametrize(("most", "evaluated"), [(6, [4, 6]), (4, [4])])
def test_max_step_ends_training_with_an_evaluation(make_spec, tmp_path, most, evaluated):
    job = trained(make_spec(max_step=most, output=str(tmp_path / "out")))
    assert steps_of(job.script.notices("evaluation")) == evaluated
    finished = job.script.last_word
    assert (finished.step, finished.epochs) == (most, 1)
    assert dict(finished.metrics) == job.script.notices("evaluation")[-1]["metrics"]
    assert finished.metrics.keys() == {"loss", "error"}
    assert job.script.session.core.reporting.totals[0] == most
    saved = torch.load(tmp_path / "out" / "model.pt")
    torch.testing.assert_close(saved, job.learner.state.model.state_dict(), rtol=0, atol=0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.pt"]


def test_callbacks_are_called_once_however_often_the_world_changes(make_spec):
    journal = Journal()
    spec = make_spec(num_epochs=2, global_batch_size=12)  # batches of 12, 12, 12, 4
    job = trained(spec, ScriptedMaster(leave_after={2, 4, 8}), {("elasticdl.step", 7)}, [journal])
    assert journal.of("on_train_begin") == [()]
    assert journal.of("on_epoch_begin") == [(0,), (1,)]
    assert [step for step, _ in journal.of("on_train_batch_end")] == list(range(1, 9))
    assert [epoch for epoch, _ in journal.of("on_epoch_end")] == [0, 1]
    assert len(journal.of("on_evaluation_end")) == 2
    assert journal.of("on_world_change") == [(1, 0)] * 5
    assert journal.of("on_train_end") == [()]
    assert journal.calls[-1] == ("on_train_end",)
    logs = journal.of("on_epoch_end")[-1][1]
    assert logs.keys() == {"loss", "val_loss", "val_error"}
    losses = [report.loss for report in job.script.reports]
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
    assert trained(spec, callbacks=[waiting]).kept() == steps


@pytest.mark.parametrize("module", [MODULE, KERAS_MODULE], ids=["torch", "keras"])
def test_resumes_with_the_same_order_optimizer_and_numbers(make_spec, tmp_path, module):
    options = {"checkpoint_dir": str(tmp_path / "kept"), "evaluation_steps": 3, "module": module}
    whole = trained(make_spec(module=module, evaluation_steps=3))
    first = stopped(make_job(make_spec(**options), ScriptedMaster(stop_after=6)))
    second = trained(make_spec(**options))
    assert second.script.notices("resumed")[0]["step"] == 6
    ours, theirs = (
        [(each.step, each.loss, each.total_samples) for each in job.script.reports] for job in (second, whole)
    )
    assert ours == theirs[6:]
    assert (ours[0][0], ours[-1][2]) == (7, 120)
    np.testing.assert_array_equal(second.weights(), whole.weights())
    # The first was told to leave in step 6 and so before its evaluation, which the second made up for.
    assert first.script.evaluations + second.script.evaluations == whole.script.evaluations
    assert steps_of(whole.script.evaluations) == [3, 4, 6, 8, 9, 12]


def test_resuming_what_is_complete_only_exports(make_spec, tmp_path):
    options = {"checkpoint_dir": str(tmp_path / "kept"), "output": str(tmp_path / "out")}
    _, job = (trained(make_spec(**options)) for _ in range(2))
    assert job.script.reports == []
    assert job.script.notices("checkpoint") == []  # it is there
    assert len(job.script.notices("exported")) == 1
    assert job.script.last_word.metrics["error"] > 0


def test_the_only_worker_keeps_its_state_when_it_is_drained_but_not_where_the_job_stops_without(make_spec, tmp_path):
    def drained_in_step_5():
        if script.session.core.position.progress.step == 4 and not script.session.core.stopping:
            script.session.post(p.Terminated("told to leave (SIGTERM)"))
        return False

    script = ScriptedMaster()
    script.session.core.votes = drained_in_step_5
    assert stopped(make_job(make_spec(checkpoint_dir=str(tmp_path / "drained")), script)).kept()[0] == 5
    script = ScriptedMaster(stop_after=5, checkpoint=False)
    assert stopped(make_job(make_spec(checkpoint_dir=str(tmp_path / "stopped")), script)).kept() == [4]
    before = make_job(make_spec(checkpoint_dir=str(tmp_path / "before")))
    before.script.answer = lambda request: p.Ordered(m.StopWork("no need", checkpoint=True))
    stopped(before)
    assert not (tmp_path / "before").exists()


@pytest.mark.parametrize(
    ("rank", "how", "failures", "keeps"),
    [
        (0, {"leave_after": {2}}, set(), True),
        (1, {}, set(), False),
        (1, {}, {("elasticdl.step", 3)}, True),
        (1, {"leave_after": {2}}, set(), True),
    ],
    ids=["rank 0", "another, which knows that rank 0 does it", "another, whose world broke", "another, which waits"],
)
def test_who_keeps_the_last_state_when_the_job_stops(make_spec, tmp_path, rank, how, failures, keeps):
    def stopped_in_step_2():
        if told := script.session.core.position.progress.step == 1:
            script.session.post(p.Ordered(m.StopWork("told to leave", checkpoint=True)))
        return told

    script = ScriptedMaster(**how, most_worlds=1, rank=rank, size=2)
    if not how and not failures:
        script.session.core.votes = stopped_in_step_2
    job = make_job(make_spec(checkpoint_dir=str(tmp_path / "kept")), script, failures)
    assert stopped(job).kept() == ([2] if keeps else [])


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
    stopped(make_job(make_spec(**given, **kept), ScriptedMaster(stop_after=6)))
    refused(words, lambda: trained(make_spec(extra=second, **kept, **options)))


def test_an_unreadable_checkpoint_is_passed_over_for_an_older_one(make_spec, tmp_path):
    kept = {"checkpoint_dir": str(tmp_path / "kept")}
    trained(make_spec(num_epochs=2, **kept))
    newest = tmp_path / "kept" / "checkpoint-0000000008.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    job = trained(make_spec(num_epochs=2, **kept))
    assert job.script.notices("resumed")[0]["step"] == 4
    assert job.kept() == [8, 4]
    for path in (tmp_path / "kept").glob("*.pt"):
        path.write_bytes(b"rubbish")
    refused("can't be read, nor can the 1 older ones: ", lambda: trained(make_spec(**kept)))


def test_an_output_that_cannot_be_written_is_told_in_a_line(make_spec, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=r"--output .*/file/out: the model could not be written: NotADirectoryError"):
        trained(make_spec(num_epochs=1, output=str(tmp_path / "file" / "out")))
