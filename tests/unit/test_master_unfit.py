"""Workers that cannot start where others train: other data, an edited module, a file that is gone."""

import pytest
from master_kit import Yard, launched, only

from elasticdl.job import messages as m
from elasticdl.master.core import events as e
from elasticdl.master.core.fleet import LONGEST_DELAY


def fail(y, worker_id, *, trained=False, message="its training data have 960 samples, the job's 640"):
    """Its own word, and its end."""
    return y.post(e.FromWorker(worker_id, m.Failed(users=True, message=message, trained=trained))) + y.crash(worker_id)


def training_with_a_place_to_fill(maximum=2):
    y = Yard(maximum=maximum)
    y.start()
    y.train(0, 1, 2)
    y.leave(1)
    y.ask(0, left=1)
    return y


def fails(kind, y, worker_id):
    if kind == "in its first world":
        y.come(worker_id)
        y.ask(0, left=y.job.rendezvous.version)
        out = fail(y, worker_id)
        return out + y.ask(0, left=y.job.rendezvous.version)
    return fail(y, worker_id) if kind == "before it asks for a world" else y.crash(worker_id)


@pytest.mark.parametrize("kind", ["in its first world", "before it asks for a world", "without a word"])
def test_a_newcomer_that_cannot_start_is_tried_later_and_later_and_does_not_end_the_job(kind):
    y = training_with_a_place_to_fill()
    following = [2]
    for delay in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0):
        (worker_id,) = following
        assert y.end == ""
        out = fails(kind, y, worker_id)
        if delay:
            assert launched(out + y.wait(0.9 * delay)) == []
        following = launched(out + y.wait(0.2 * delay + 0.1))
    because = "crashed: detail" if kind == "without a word" else "its training data have 960 samples, the job's 640"
    assert y.warnings == [f"replacements wait 8 s: 6 workers in a row could not start, the last: {because}"]

    fails(kind, y, following[0])
    assert y.reason == f"replacements wait 16 s: 7 workers in a row could not start, the last: {because}"
    assert launched(y.exit(0) + y.wait(0.1)) == [9], "the place of one that could train is filled"
    assert len(launched(y.scale(1, 3))) == 2
    assert "could not start" not in y.reason


def test_workers_that_cannot_start_at_once_share_a_wait():
    y = training_with_a_place_to_fill(maximum=3)
    y.leave(2)
    y.ask(0, left=2)
    pair = [3, 4]
    for delay in (0.5, 0.5, 1.0):
        out = [each for worker_id in pair for each in fail(y, worker_id)]
        pair = launched(out + y.wait(2.5 * delay))
        assert len(pair) == 2
    fail(y, pair[0])
    assert y.wait(1.9) == []


def test_a_job_that_has_too_few_without_them_fails_for_that_reason_and_keeps_its_state():
    y = training_with_a_place_to_fill()
    y.scale(2, 2)
    for worker_id in range(2, 8):
        assert y.end == ""
        fail(y, worker_id, message="KeyError: 'label'")
        y.wait(LONGEST_DELAY)
    assert y.end == (
        "6 workers in a row could not start, last worker 7: KeyError: 'label'; too few are left to train, and the state is kept"
    )
    assert [(each.to, each.message.checkpoint) for each in only(m.StopWork, y.out)] == [((0,), True)]


def beats(y, worker_id, *steps):
    for step in steps:
        y.post(e.FromWorker(worker_id, m.Heartbeat(y.job.rendezvous.version, step, step, waiting=False)))


def test_one_that_trains_ends_the_row():
    """However often it happens to a job, one after another that could start meanwhile."""
    y = training_with_a_place_to_fill()
    y.scale(2, 2)
    newcomer = 2
    for _ in range(6):
        (newcomer,) = launched(fail(y, newcomer) + y.wait(0.1))
        y.come(newcomer)
        y.ask(0, left=y.job.rendezvous.version)
        beats(y, newcomer, 1, 2)
        assert y.end == ""
        out = y.exit(newcomer) + y.ask(0, left=y.job.rendezvous.version)
        (newcomer,) = launched(out + y.wait(0.1))
    assert "could not start" not in y.reason


@pytest.mark.parametrize("somebody_trained", [True, False])
def test_what_the_code_of_a_worker_raises_that_has_trained_or_before_anybody_has_ends_the_job(somebody_trained):
    y = training_with_a_place_to_fill() if somebody_trained else Yard(maximum=2)
    if not somebody_trained:
        y.start()
    fail(y, 0, trained=somebody_trained, message="KeyError: 'label'")
    assert y.end == "KeyError: 'label'"
