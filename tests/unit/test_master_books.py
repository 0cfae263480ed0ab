"""The job's books: running numbers, journal, summary, TensorBoard."""

import json
import math
from pathlib import Path

import pytest

from elasticdl.job import messages as m
from elasticdl.job.journal import dump_entry
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as i
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Settings
from elasticdl.master.core.worker_record import MOST_EPOCHS, Training
from elasticdl.master.shell.calls import to_event
from elasticdl.master.shell.journal_file import Journal
from elasticdl.master.shell.observers import TensorBoard
from elasticdl.proto import elasticdl_pb2 as pb


class Told:
    """A training, and what is told of it."""

    def __init__(self, training=None):
        self.training = training or Training()

    def steps(self, *steps, now=0.0, epoch=0, world=1, total=100, epochs=2, **each):
        """``each``: fields of all steps, or a list with one for each. Returns steps that are new, and records."""
        told = []
        for number, step in enumerate(steps):
            fields = {"loss": 1 / step, "samples_in_step": 32, "ends": False, "compared": 0}
            fields |= {name: value[number] if isinstance(value, list) else value for name, value in each.items()}
            seen = (fields["loss"], fields["samples_in_step"], 0.1, 0.05, world, 32 * step, fields["ends"])
            told.append(m.StepReport(step, epoch, *seen, compared=fields["compared"]))
        new, records = self.training.report(m.Progress(tuple(told), total, epochs), now)
        return [step.step for step in new], records

    def epochs(self, *steps, **more):
        """What is recorded of their ends."""
        return [record.fields for record in self.steps(*steps, **more)[1]]


def test_a_new_rank_0_may_tell_again_what_its_predecessor_has_told():
    told = Told()
    assert told.steps(1, 2, 3)[0] == [1, 2, 3]
    assert told.steps(1, 2, 3, 4, 5)[0] == [4, 5], "what rank 0 of world 1 had not told before it was killed"
    assert told.steps(6, 7, world=2)[0] == [6, 7]
    assert told.steps(3, 4, world=2)[0] == []
    assert told.steps(3, 4, world=3)[0] == [3, 4], "the state was lost and the steps are trained again"
    (fields,) = told.epochs(8, epoch=1, world=3)
    assert fields["loss"] == pytest.approx(sum(1 / n for n in range(1, 8)) / 7), "each counts once"


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples_and_told_once_with_its_last_step():
    told = Told()
    assert told.epochs(1, loss=4.0, samples_in_step=30) == []
    assert told.epochs(2, loss=2.0, samples_in_step=10, ends=True) == [{"epoch": 0, "step": 2, "loss": 3.5}]
    assert told.epochs(3, epoch=1, loss=1.0, samples_in_step=30) == []
    ended = {"epoch": 1, "step": 4, "loss": 0.75}
    assert told.epochs(4, epoch=1, loss=0.0, samples_in_step=10, ends=True) == [ended]
    assert told.training.finish(m.Finished(4, 2, {})) == []
    assert Told().epochs(31, epoch=1, loss=2.0, ends=True) == [{"epoch": 1, "step": 31, "loss": 2.0}], "after a load"


def test_an_epochs_end_tells_when_the_states_were_last_compared_also_where_no_step_ends_it():
    told = Told()
    assert told.epochs(1, 2, 3, 4, loss=1.0, compared=[3, 0, 2, 0]) == []
    ended = {"epoch": 0, "step": 4, "loss": 1.0, "compared": 2, "compared_workers": 2}
    assert told.epochs(5, epoch=1) == [ended]
    done = m.Finished(5, 2, {"accuracy": 0.5})
    assert [r.fields["epoch"] for r in told.training.finish(done)] == [1]
    assert told.training.finish(done) == []
    assert told.training.metrics == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("loss", "samples", "steps", "completion"),
    [
        (1.0, 8, 1, "training is complete"),
        (math.nan, 8, 1, "training is complete, but has diverged: its last loss is nan"),
        (math.nan, 0, 1, "training is complete"),  # the script tells of no loss
        (math.nan, 8, 0, "training is complete"),  # what it has gone on from was complete
    ],
)
def test_a_training_that_ends_without_a_loss_is_complete_and_has_diverged(loss, samples, steps, completion):
    assert Training(loss=loss, samples=samples, counted=steps).completion == completion


def test_a_training_that_has_diverged_is_reported_once_and_stays_valid_json():
    assert math.isnan(Training().loss)
    _, records = Told().steps(1, 2, 3, loss=[2.0, math.nan, math.inf], ends=[False, False, True])
    assert [record.event for record in records] == ["warning", "epoch_finished"]
    assert "step 2 is nan" in records[0].fields["message"]
    line = dump_entry({"event": "epoch_finished", **records[1].fields, "metrics": {"a": [math.inf, 1.5]}})
    assert json.loads(line, parse_constant=pytest.fail)["metrics"] == {"a": [None, 1.5]}


def test_the_rate_is_of_the_last_seconds_only():
    told = Told()
    assert (told.training.samples_per_second(0.0), told.training.time_left(0.0)) == (0.0, -1.0)
    for second in range(20):
        told.steps(2 * second + 1, 2 * second + 2, now=float(second))
    assert told.training.samples_per_second(19.0) == pytest.approx(64.0)
    assert told.training.time_left(19.0) == pytest.approx(30.0)
    assert told.training.samples_per_second(60.0) == 0.0
    for tenth in range(3):
        told.steps(tenth + 41, now=100 + tenth / 10)
    assert told.training.samples_per_second(100.2) == pytest.approx(320), "after a long pause it is that after it"


def test_the_numbers_go_on_where_an_earlier_master_was():
    first = Told()
    first.steps(1, 2, 3, 4, ends=[False, False, False, True])
    first.steps(5, epoch=1, loss=5.0, compared=2)
    first.training.notice(m.Notice("evaluation", {"metrics": {"accuracy": 0.5}}))
    second = Told(Training.restore(first.training.snapshot()))
    training = second.training
    assert (training.step, training.samples, training.epochs_done, training.metrics) == (5, 160, 1, {"accuracy": 0.5})
    assert training.compared_workers == 2
    assert second.epochs(3, 4, 5, 6, epoch=1, loss=6.0) == [], "rank 0 tells again what it has kept"
    (fields,) = second.epochs(5, 6, 7, 8, epoch=1, loss=[5.0, 6.0, 7.0, 8.0], ends=[False, False, False, True])
    assert (fields["epoch"], fields["step"], fields["loss"]) == (1, 8, 6.5)


# ---- the journal and TensorBoard ----


@pytest.mark.parametrize("opened", [Journal, lambda path: TensorBoard(str(path / "below"))])
def test_what_cannot_be_written_is_reported_once_and_stops_nothing(opened, caplog):
    book = opened(Path("/dev/full"))
    for size in (1, 2):
        if isinstance(book, Journal):
            book.append("worker_ready", {"worker": size})
        else:
            book.recorded("world_formed", {"members": [0] * size})
            book.recorded("pause", {"world": size, "kind": "grow", "total": 0.25})
    book.close()
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1


# ---- what workers say ----


def notice(event, /, **fields):
    return pb.WorkerMessage(notice=pb.Notice(event=event, fields_json=json.dumps(fields)))


@pytest.mark.parametrize(
    "message",
    [
        pb.WorkerMessage(),
        pb.WorkerMessage(notice=pb.Notice(event="warning", fields_json="[1]")),
        pb.WorkerMessage(notice=pb.Notice(event="warning", fields_json="{")),
        notice("pause", kind="of another kind"),
        notice("job_finished", phase="succeeded"),
        notice("nothing known"),
        *(notice("exported", path="x", **more) for more in ({"worker": 1}, {"time": 0}, {"event": "job_finished"})),
        notice("exported", path=5),
        *(notice("evaluation", metrics={"accuracy": value}) for value in ("good", 10**400)),
        notice("evaluation", step=-1, metrics={"loss": 0.5}),  # TensorBoard's file has no way to write it
        *(notice("resumed", path="x", **more) for more in ({"step": 2**63}, {"step": 1, "epoch": 2**31})),
        *(notice("worker_stuck", stack=stack) for stack in (["x"] * 101, ["x" * 1001])),
        notice("worker_waits", seconds=5.0),  # the core reads both of its fields
    ],
)
def test_messages_without_meaning_are_refused(message):
    with pytest.raises(ValueError, match=r".+"):
        to_event(0, message)


def test_epochs_that_are_made_up_make_no_endless_list():
    told = Told()
    told.steps(1)
    records = told.training.finish(m.Finished(1, 2**31 - 1, {}))
    assert (len(records), records[-1].fields["epoch"]) == (MOST_EPOCHS, 2**31 - 2)


def test_a_notice_is_in_the_journal_as_that_of_the_worker_in_whose_session_it_came():
    told = to_event(3, notice("evaluation", step=2, epoch=0, samples=9, metrics={"loss": math.nan, "accuracy": 1}))
    (record,) = Job(Settings(WorkerRange(minimum=1, maximum=2))).step(told, 0.0)
    assert record == i.Record("evaluation", {**told.said.fields, "worker": 3})
