"""What is done when, exactly once, whatever becomes of the world: with worlds of one that follow a script."""

import threading
import uuid
from collections import namedtuple

import pytest
import torch
from worker_kit import Script, make_job, write_zoo

from elasticdl.callbacks import Callback, LearningRateScheduler
from elasticdl.common.errors import UserError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.interruptions import Stopped
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.worker.checkpoint import CHECKPOINT_THREAD
from elasticdl.worker.torch_learner import TorchLearner

# 40 samples in batches of 10: four steps an epoch.
STEPS_PER_EPOCH = 4


@pytest.fixture
def make_spec(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(__import__("sys").path))

    def make(**options):
        name = f"zoo_{uuid.uuid4().hex}"
        zoo = write_zoo(tmp_path / "zoo", options.pop("extra", ""), name=name)
        given = {"global_batch_size": 10, "max_worker_batch_size": 4, "num_epochs": 3, **options}
        return JobSpec(model_zoo=str(zoo), model_def=name, **given)

    return make


def test_a_checkpoint_holds_plain_containers_only():
    Pair = namedtuple("Pair", ("first", "second"))
    copied = TorchLearner.codec.copy({"state": Pair(torch.ones(2), [1, (2,)])})
    assert type(copied["state"]) is tuple
    assert copied["state"][1] == [1, (2,)]


class Journal(Callback):
    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        return lambda *arguments: self.calls.append((name, *arguments))

    def of(self, hook):
        return [call[1:] for call in self.calls if call[0] == hook]


class WaitsForCheckpoints(Callback):
    """Steps here take a millisecond: without it a checkpoint is left out when the last one is still being written."""

    def on_train_batch_end(self, *_):
        for thread in threading.enumerate():
            if thread.name == CHECKPOINT_THREAD:
                thread.join(timeout=60)


def weights(job):
    return torch.cat([parameter.detach().reshape(-1) for parameter in job.learner.state.model.parameters()])


def test_evaluates_at_the_end_of_each_epoch_and_finishes(make_spec):
    job = make_job(make_spec())
    job.trainer.run()
    assert [entry["step"] for entry in job.script.notices("evaluation")] == [4, 8, 12]
    assert [entry["epoch"] for entry in job.script.notices("evaluation")] == [0, 1, 2]
    assert all(0 < entry["seconds"] < 60 for entry in job.script.notices("evaluation"))
    finished = job.script.last_word
    assert (finished.step, finished.epochs) == (12, 3)
    assert dict(finished.metrics) == job.script.notices("evaluation")[-1]["metrics"]
    assert finished.metrics.keys() == {"loss", "error"}


def test_what_is_due_twice_over_is_done_once(make_spec):
    job = make_job(make_spec(evaluation_steps=2))
    job.trainer.run()
    assert [entry["step"] for entry in job.script.notices("evaluation")] == [2, 4, 6, 8, 10, 12]


@pytest.mark.parametrize("left", [{3}, {4}, {12}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}])
def test_leaving_worlds_changes_nothing_in_what_is_done(make_spec, left):
    options = {"evaluation_steps": 3, "extra": "\n"}
    calm, moved = make_job(make_spec(**options)), make_job(make_spec(**options), Script(leave_after=set(left)))
    for job in (calm, moved):
        job.trainer.run()
    assert moved.script.worlds == len(left) + 1
    assert moved.script.evaluations == calm.script.evaluations
    assert [report.step for report in moved.script.reports] == list(range(1, 13))
    assert [report.step for report in moved.script.reports if report.ends_epoch] == [4, 8, 12]
    assert moved.script.reports[-1].total_samples == 120
    torch.testing.assert_close(weights(moved), weights(calm), rtol=0, atol=0)


@pytest.mark.parametrize(
    "failure",
    [("elasticdl.step", 3), ("elasticdl.step", 4), ("elasticdl.step", 5), ("elasticdl.evaluation", 1),
     ("elasticdl.evaluation", 3), ("elasticdl.complete", 1)],
)  # fmt: skip
def test_a_broken_world_changes_nothing_in_what_is_done(make_spec, failure):
    calm, broken = make_job(make_spec()), make_job(make_spec(), failures={failure})
    for job in (calm, broken):
        job.trainer.run()
    assert broken.script.worlds == 2
    assert broken.script.evaluations == calm.script.evaluations
    assert [report.step for report in broken.script.reports] == list(range(1, 13))
    torch.testing.assert_close(weights(broken), weights(calm), rtol=0, atol=0)


def test_an_evaluation_of_which_others_may_know_nothing_is_forgotten(make_spec):
    # The step after the evaluation is torn: another member may have lost the world within the evaluation.
    job = make_job(make_spec(), failures={("elasticdl.step", 5)})
    job.trainer.run()
    assert job.context.collective.done["elasticdl.evaluation"] == 4
    assert len(job.script.notices("evaluation")) == 3


def test_max_step_ends_within_an_epoch_with_an_evaluation(make_spec, tmp_path):
    job = make_job(make_spec(max_step=6, output=str(tmp_path / "out")))
    job.trainer.run()
    assert [entry["step"] for entry in job.script.notices("evaluation")] == [4, 6]
    assert job.script.last_word.step == 6
    assert job.script.last_word.epochs == 1
    assert job.script.session.core.reporting.totals[0] == 6
    saved = torch.load(tmp_path / "out" / "model.pt")
    torch.testing.assert_close(saved, job.learner.state.model.state_dict(), rtol=0, atol=0)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.pt"]


def test_max_step_at_the_end_of_an_epoch_ends_that_epoch(make_spec):
    job = make_job(make_spec(max_step=4))
    job.trainer.run()
    assert (job.script.last_word.step, job.script.last_word.epochs) == (4, 1)


def test_callbacks_are_called_once_however_often_the_world_changes(make_spec):
    journal = Journal()
    job = make_job(make_spec(num_epochs=2), Script(leave_after={2, 4, 8}), {("elasticdl.step", 7)}, [journal])
    job.trainer.run()
    assert journal.of("on_train_begin") == [()]
    assert journal.of("on_epoch_begin") == [(0,), (1,)]
    assert [step for step, _ in journal.of("on_train_batch_end")] == list(range(1, 9))
    assert [epoch for epoch, _ in journal.of("on_epoch_end")] == [0, 1]
    assert len(journal.of("on_evaluation_end")) == 2
    assert journal.of("on_world_change") == [(1, 0)] * 5
    assert journal.of("on_train_end") == [()]
    assert journal.calls[-1] == ("on_train_end",)
    assert journal.of("on_epoch_end")[-1][1].keys() == {"loss", "val_loss", "val_error"}


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples(make_spec):
    journal = Journal()
    job = make_job(make_spec(global_batch_size=12, num_epochs=2), callbacks=[journal])  # batches of 12, 12, 12, 4
    job.trainer.run()
    losses = [report.loss for report in job.script.reports]
    expected = (12 * sum(losses[4:7]) + 4 * losses[7]) / 40
    assert journal.of("on_epoch_end")[1][1]["loss"] == pytest.approx(expected)


def test_a_checkpoint_each_epoch_or_each_so_many_steps(make_spec, tmp_path):
    def steps(**options):
        folder = tmp_path / uuid.uuid4().hex
        spec = make_spec(checkpoint_dir=str(folder), keep_checkpoint_max=0, **options)
        job = make_job(spec, callbacks=[WaitsForCheckpoints()])
        job.trainer.run()
        return [checkpoint.step for checkpoint in job.learner.store.newest_first()]

    assert steps() == [12, 8, 4]
    assert steps(checkpoint_steps=5) == [12, 10, 5]  # and one at the end


def test_resumes_with_the_same_order_optimizer_and_numbers(make_spec, tmp_path):
    options = {"checkpoint_dir": str(tmp_path / "kept"), "evaluation_steps": 3}
    whole = make_job(make_spec(evaluation_steps=3))
    whole.trainer.run()
    first = make_job(make_spec(**options), Script(stop_after=6))
    with pytest.raises(Stopped):
        first.trainer.run()
    second = make_job(make_spec(**options))
    second.trainer.run()
    assert second.script.notices("resumed")[0]["step"] == 6
    assert [report.step for report in second.script.reports] == list(range(7, 13))
    assert [report.loss for report in second.script.reports] == [report.loss for report in whole.script.reports[6:]]
    assert [report.total_samples for report in second.script.reports] == [
        r.total_samples for r in whole.script.reports[6:]
    ]
    assert second.script.reports[-1].total_samples == 120
    torch.testing.assert_close(weights(second), weights(whole), rtol=0, atol=0)
    seen = first.script.evaluations + second.script.evaluations
    # The first was told to leave in step 6 and so before its evaluation, which the second made up for.
    assert [entry["step"] for entry in seen] == [3, 4, 6, 8, 9, 12]
    assert seen == whole.script.evaluations


def test_a_checkpoint_holds_what_the_master_has_learnt_of_the_job(make_spec, tmp_path):
    first, second = (make_job(make_spec(checkpoint_dir=str(tmp_path / "kept"))) for _ in range(2))
    first.script.session.receive(pb.MasterMessage(welcome=pb.Welcome(learnt="at first")))
    first.script.session.receive(pb.MasterMessage(learnt=pb.Learnt(json="later")))
    first.trainer.run()
    second.trainer.run()
    assert [notice["learnt"] for notice in second.script.notices("resumed")] == ["later"]


def test_resuming_what_is_complete_only_exports(make_spec, tmp_path):
    options = {"checkpoint_dir": str(tmp_path / "kept"), "output": str(tmp_path / "out")}
    for _ in range(2):
        job = make_job(make_spec(**options))
        job.trainer.run()
    assert job.script.reports == []
    assert job.script.notices("checkpoint") == []  # it is there
    assert len(job.script.notices("exported")) == 1
    assert job.script.last_word.metrics["error"] > 0


def test_told_to_leave_before_training_leaves_no_checkpoint(make_spec, tmp_path):
    job = make_job(make_spec(checkpoint_dir=str(tmp_path / "kept")), Script(stop_after=1))
    job.script.answer = lambda request: p.StopOrdered("no need", checkpoint=True)
    with pytest.raises(Stopped):
        job.trainer.run()
    assert not (tmp_path / "kept").exists()


def test_the_only_worker_keeps_its_state_when_it_is_drained(make_spec, tmp_path):
    job = make_job(make_spec(checkpoint_dir=str(tmp_path / "kept")), Script(stop_after=5, checkpoint=False))
    with pytest.raises(Stopped):
        job.trainer.run()
    assert job.learner.store.newest_first()[0].step == 5


@pytest.mark.parametrize(
    ("rank", "failures", "keeps"),
    [(0, set(), True), (1, set(), False), (1, {("elasticdl.step", 3)}, True)],
    ids=["rank 0", "another, which knows that rank 0 does it", "another, which does not know whether rank 0 is left"],
)
def test_who_keeps_the_last_state_when_the_job_stops(make_spec, tmp_path, rank, failures, keeps):
    script = Script(leave_after=set() if failures else {2}, most_worlds=1, rank=rank, size=2)
    job = make_job(make_spec(checkpoint_dir=str(tmp_path / "kept")), script, failures)
    with pytest.raises(Stopped):
        job.trainer.run()
    assert [checkpoint.step for checkpoint in job.learner.store.newest_first()] == ([2] if keeps else [])


TWO_GROUPS = """
def optimizer(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.02}])
"""


def test_the_schedule_is_asked_in_each_epoch_and_world_and_keeps_the_ratio_of_groups(make_spec):
    asked = []

    def schedule(epoch):
        asked.append(epoch)
        return 0.4 / (epoch + 1)

    spec = make_spec(num_epochs=2, extra=TWO_GROUPS)
    job = make_job(spec, Script(leave_after={6}), callbacks=[LearningRateScheduler(schedule)])
    job.trainer.run()
    assert asked == [0, 1, 1]
    assert [report.learning_rate for report in job.script.reports] == [0.4] * 4 + [0.2] * 4
    assert [group["lr"] for group in job.learner.state.optimizer.param_groups] == [0.2, pytest.approx(0.04)]


def test_a_rate_that_a_callback_of_the_modules_sets_stays(make_spec):
    """As one that steps a scheduler of torch's."""

    class Halves(Callback):
        def on_epoch_end(self, epoch, logs):
            for group in job.learner.state.optimizer.param_groups:
                group["lr"] /= 2

    job = make_job(make_spec(num_epochs=2), callbacks=[Halves()])
    job.trainer.run()
    assert [report.learning_rate for report in job.script.reports] == [0.1] * 4 + [0.05] * 4


def test_a_checkpoint_of_another_kind_of_optimizer_is_refused(make_spec, tmp_path):
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "num_epochs": 1}
    make_job(make_spec(**kept)).trainer.run()
    adam = "\ndef optimizer(parameters):\n    return torch.optim.Adam(parameters)\n"
    with pytest.raises(UserError, match="is of another model: its optimizer is of another kind"):
        make_job(make_spec(extra=adam, **kept)).trainer.run()
    with pytest.raises(UserError, match="does not fit the optimizer: ValueError"):
        make_job(make_spec(extra=TWO_GROUPS, **kept)).trainer.run()


def test_a_checkpoint_of_another_model_ends_the_job_in_a_line(make_spec, tmp_path):
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "num_epochs": 1}
    make_job(make_spec(**kept)).trainer.run()
    other = "\ndef custom_model():\n    return torch.nn.Linear(2, 1)\n"
    with pytest.raises(
        UserError, match=r"checkpoint-0000000004\.pt is of another model: it (has|has no) \S+"
    ) as caught:
        make_job(make_spec(extra=other, **kept)).trainer.run()
    assert "\n" not in str(caught.value)
    wider = other.replace("Linear(2, 1)", "Sequential(torch.nn.Linear(2, 3))")
    narrower = other.replace("Linear(2, 1)", "Sequential(torch.nn.Linear(2, 2))")
    kept["checkpoint_dir"] = str(tmp_path / "wide")
    make_job(make_spec(extra=wider + FLAT_LOSS, **kept)).trainer.run()
    with pytest.raises(UserError, match=r"0\.(weight|bias) has shape \(3.*\) there and \(2"):
        make_job(make_spec(extra=narrower + FLAT_LOSS, **kept)).trainer.run()


FLAT_LOSS = (
    "\ndef loss(labels, predictions):\n    return (predictions.mean(dim=1, keepdim=True) - labels).square().mean()\n"
)


def test_a_checkpoint_within_an_epoch_of_other_data_is_refused(make_spec, tmp_path):
    kept = {"checkpoint_dir": str(tmp_path / "kept")}
    with pytest.raises(Stopped):
        make_job(make_spec(**kept), Script(stop_after=6)).trainer.run()
    with pytest.raises(UserError, match="seed was 0 and is 7"):
        make_job(make_spec(seed=7, **kept)).trainer.run()


def test_an_unreadable_checkpoint_is_set_aside_for_an_older_one(make_spec, tmp_path):
    kept = {"checkpoint_dir": str(tmp_path / "kept")}
    make_job(make_spec(num_epochs=2, **kept)).trainer.run()
    newest = tmp_path / "kept" / "checkpoint-0000000008.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    job = make_job(make_spec(num_epochs=2, **kept))
    job.trainer.run()
    assert job.script.notices("resumed")[0]["step"] == 4
    assert (tmp_path / "kept" / "checkpoint-0000000008.pt.unreadable").exists()
    assert [checkpoint.step for checkpoint in job.learner.store.newest_first()] == [8, 4]
    for path in (tmp_path / "kept").glob("*.pt"):
        path.write_bytes(b"rubbish")
    with pytest.raises(UserError, match="none of the 2 checkpoints can be read"):
        make_job(make_spec(**kept)).trainer.run()


def test_an_output_that_cannot_be_written_is_told_in_a_line(make_spec, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=r"--output .*/file/out: the model could not be written: NotADirectoryError"):
        make_job(make_spec(num_epochs=1, output=str(tmp_path / "file" / "out"))).trainer.run()
