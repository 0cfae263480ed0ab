"""Steps in the journal: bunches that lose nothing, and a state ConfigMap that they do not fill."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from elasticdl.job.journal import STEPS, Steps
from elasticdl.job.messages import Pace, StepReport
from elasticdl.master.core.worker_record import TrainingSnapshot
from elasticdl.master.shell.journal_file import StepLog

PACE = Pace(busy=0.04, waited=0.01, least_waited=0.004)
ENDS = ("world_broken", "world_formed", "phase")
ONE = StepReport(1, 0, 2.0, 32, 0.1, 0.05, 1, 32, False)


class Book:
    """What a `StepLog` writes, under a clock that is set."""

    def __init__(self, started=0.0, counted=0):
        self.now = started
        self.entries = []
        self.told = []
        past = TrainingSnapshot(counted=counted)
        self.log = StepLog(
            self.append, lambda _, fields: self.told.append(fields), lambda: self.now, started, None, past
        )

    def append(self, event, fields):
        assert event == STEPS
        self.entries.append(dict(fields))
        self.log.recorded(event, fields)  # as all observers hear of all entries

    def train(self, *numbers, world=1, seconds=0.05, **changed):
        one = dataclasses.replace(ONE, world_version=world, seconds=seconds, **changed)
        self.log.trained([dataclasses.replace(one, step=number) for number in numbers], PACE)


def test_the_first_step_of_a_world_is_told_at_once_and_the_others_in_bunches():
    book = Book()
    book.train(1, seconds=0.0)
    for tenth in range(1, 25):
        book.now = tenth / 10
        book.train(tenth + 1)
    assert [(entry["step"], entry["steps"]) for entry in book.entries] == [(1, 1), (11, 10), (21, 10)]
    assert book.entries[1]["seconds"] == 0.5
    assert book.entries[1]["slowest"] == 0.006


def test_the_longer_a_job_runs_the_rarer_entries_become():
    book = Book()
    for second in range(20_000):
        book.now = float(second)
        book.train(second + 1)
    assert 3_500 < len(book.entries) < 3_700  # each second for 1,000 s, then each thousandth of the job's age
    assert book.entries[-1]["steps"] in (19, 20, 21)
    assert len(book.told) == 20_000, "those who count them hear of them each second"


happenings = st.tuples(
    st.integers(1, 3), st.sampled_from(["", "", "world_broken", "world_formed", "phase", "worker_left"])
)


@given(st.integers(0, 5), st.lists(st.tuples(happenings, st.lists(st.integers(1, 20), max_size=5)), max_size=10))
def test_each_step_is_told_once_and_counts_as_made_again_if_another_master_has_counted_it_too(counted, happenings):
    book, made = Book(counted=counted), []
    for (world, event), numbers in happenings:
        book.now += 0.3
        book.train(*numbers, world=world)
        made += numbers
        written = len(book.entries)
        book.log.recorded(event, {})
        book.log.recorded(event, {})
        assert len(book.entries) <= written + 1
        if event in ENDS:
            assert sum(entry["steps"] for entry in book.entries) == len(made), "what ends a world has the steps told"
    book.log.flush()
    again = sum(number <= max((counted, *made[:place])) for place, number in enumerate(made))
    for told in (book.entries, book.told):
        assert [sum(entry[name] for entry in told) for name in ("steps", "samples")] == [len(made), 32 * len(made)]
        assert sum(entry["again"] for entry in told) == again


def test_a_loss_that_is_no_number_is_null():
    book = Book()
    book.train(1)
    book.train(2, 3, loss=float("nan"))
    book.log.flush()
    assert book.entries[-1]["loss"] is None
    book.train(4, samples=0)
    book.log.flush()
    assert (book.entries[-1]["loss"], book.entries[-1]["learning_rate"]) == (None, None)


def test_the_loss_of_two_is_their_mean_over_samples():
    first = Steps(1, 1, 1, 10, 1.0, 0.1, 1, 0, 0)
    joined = first + dataclasses.replace(first, step=2, samples=30, loss=3.0)
    assert (joined.step, joined.samples, joined.loss) == (2, 40, 2.5)
    unknown = dataclasses.replace(first, loss=None)
    assert ((first + unknown).loss, (unknown + first).loss, (unknown + unknown).loss) == (1.0, 1.0, None)


# ---- in the ConfigMap ----
