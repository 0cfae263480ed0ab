"""The job's books: running numbers, steps in the journal, TensorBoard, and what a worker may have written there."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.job import messages as m
from elasticdl.job.journal import STEPS, dump_entry
from elasticdl.job.messages import Pace, StepReport
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core.job_core import Job
from elasticdl.master.core.values import Settings
from elasticdl.master.core.worker_record import MOST_EPOCHS, Training, TrainingSnapshot
from elasticdl.master.shell.calls import to_event
from elasticdl.master.shell.journal_file import Journal, StepLog
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
            told.append(StepReport(step, epoch, *seen, compared=fields["compared"]))
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


def test_an_epochs_loss_is_the_mean_over_its_samples_and_told_once_with_when_states_were_last_compared():
    told = Told()
    assert told.epochs(7, loss=4.0, samples_in_step=30, compared=3) == []
    ended = {"epoch": 0, "step": 8, "loss": 3.5, "compared": 6, "compared_workers": 3}
    assert told.epochs(8, loss=2.0, samples_in_step=10, ends=True) == [ended]
    assert told.epochs(9, epoch=1, loss=1.0) == []
    done = m.Finished(9, 2, {"accuracy": 0.5})
    assert [record.fields["epoch"] for record in told.training.finish(done)] == [1], "though no step has ended it"
    assert (told.training.finish(done), told.training.metrics) == ([], {"accuracy": 0.5})
    assert Told().epochs(31, epoch=1, loss=2.0, ends=True) == [{"epoch": 1, "step": 31, "loss": 2.0}], "after a load"
    (made_up := Told()).steps(1)
    records = made_up.training.finish(m.Finished(1, 2**31 - 1, {}))
    assert (len(records), records[-1].fields["epoch"]) == (MOST_EPOCHS, 2**31 - 2), "epochs are made up"


@pytest.mark.parametrize(
    ("samples", "steps", "diverged"),
    [(8, 1, ", but has diverged: its last loss is nan"), (0, 1, ""), (8, 0, "")],
    ids=["", "the script tells of no loss", "it has gone on from what was complete"],
)
def test_a_training_that_ends_without_a_loss_is_complete_and_has_diverged(samples, steps, diverged):
    ended = Training(loss=math.nan, samples=samples, counted=steps)
    assert ended.completion == f"training is complete{diverged}"


def test_a_training_that_has_diverged_is_reported_once_and_stays_valid_json():
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


@pytest.mark.parametrize("opened", [Journal, lambda path: TensorBoard(str(path / "below"))])
def test_what_cannot_be_written_is_reported_once_and_stops_nothing(opened, caplog):
    book = opened(Path("/dev/full"))
    for size in (1, 2):
        if isinstance(book, Journal):
            book.append("worker_ready", {"worker": size})
        else:
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
        *(pb.WorkerMessage(notice=pb.Notice(event="warning", fields_json=each)) for each in ("[1]", "{")),
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


def test_a_notice_is_in_the_journal_as_that_of_the_worker_in_whose_session_it_came():
    told = to_event(3, notice("evaluation", step=2, epoch=0, samples=9, metrics={"loss": math.nan, "accuracy": 1}))
    (record,) = Job(Settings(WorkerRange(minimum=1, maximum=2))).step(told, 0.0)
    assert record == e.Record("evaluation", {**told.said.fields, "worker": 3})


# ---- steps in the journal: bunches that lose nothing ----

ENDS = ("world_broken", "world_formed", "phase")
ONE = StepReport(1, 0, 2.0, 32, 0.1, 0.05, 1, 32, False)


class Book:
    """What a `StepLog` writes, under a clock that is set."""

    def __init__(self, counted=0):
        self.now, self.entries, self.told = 0.0, [], []
        tell, past = lambda _, fields: self.told.append(fields), TrainingSnapshot(counted=counted)
        self.log = StepLog(self.append, tell, lambda: self.now, 0.0, None, past)

    def append(self, event, fields):
        assert event == STEPS
        self.entries.append(dict(fields))
        self.log.recorded(event, fields)  # as all observers hear of all entries

    def train(self, *numbers, world=1, **changed):
        one = dataclasses.replace(ONE, world_version=world, **changed)
        pace = Pace(busy=0.04, waited=0.01, least_waited=0.004)
        self.log.trained([dataclasses.replace(one, step=number) for number in numbers], pace)


def test_the_first_step_of_a_world_is_told_at_once_and_the_others_in_bunches_with_their_mean_loss():
    book = Book()
    book.train(1, seconds=0.0)
    for tenth in range(1, 25):
        book.now = tenth / 10
        book.train(tenth + 1, loss=math.nan if tenth > 10 else 1.0 + 3 * (tenth == 1), samples=32 * (tenth < 20))
    entries = [(entry["step"], entry["steps"], entry["loss"]) for entry in book.entries]
    assert entries == [(1, 1, 2.0), (11, 10, pytest.approx(1.3)), (21, 10, None)]
    assert (book.entries[1]["seconds"], book.entries[1]["slowest"]) == (0.5, 0.006)


def test_the_longer_a_job_runs_the_rarer_entries_become():
    book = Book()
    for second in range(5_000):
        book.now = float(second)
        book.train(second + 1)
    assert 2_200 < len(book.entries) < 2_400  # each second for 1,000 s, then each thousandth of the job's age
    assert len(book.told) == 5_000, "those who count them hear of them each second"


happenings = st.tuples(st.integers(1, 3), st.sampled_from(["", "", *ENDS, "worker_left"]))


@given(st.integers(0, 5), st.lists(st.tuples(happenings, st.lists(st.integers(1, 20), max_size=5)), max_size=10))
def test_each_step_is_told_once_and_counts_as_made_again_if_another_master_has_counted_it_too(counted, happenings):
    book, made = Book(counted), []
    for (world, event), numbers in happenings:
        book.now += 0.3
        book.train(*numbers, world=world)
        made += numbers
        book.log.recorded(event, {})
        book.log.recorded(event, {})
        if event in ENDS:
            assert sum(entry["steps"] for entry in book.entries) == len(made), "what ends a world has the steps told"
    book.log.flush()
    again = sum(number <= max((counted, *made[:place])) for place, number in enumerate(made))
    for told in (book.entries, book.told):
        assert [sum(entry[name] for entry in told) for name in ("steps", "samples", "again")] == [
            len(made), 32 * len(made), again,
        ]  # fmt: skip
