"""Workers that cannot start where others train: other data, an edited module, a file that is gone."""

import pytest
from master_kit import Yard, launched, only

from elasticdl.job import messages as m
from elasticdl.master.core import events as e
from elasticdl.master.core.fleet import LONGEST_DELAY, TRIES_OF_PLACE


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
        y.ask(0, left=y.job.view().world_version)
        out = fail(y, worker_id)
        return out + y.ask(0, left=y.job.view().world_version)
    return fail(y, worker_id) if kind == "before it asks for a world" else y.crash(worker_id)


@pytest.mark.parametrize("kind", ["in its first world", "before it asks for a world", "without a word"])
def test_a_newcomer_that_cannot_start_ends_the_tries_of_its_place_and_not_the_job(kind):
    y = training_with_a_place_to_fill()
    for worker_id in range(2, 2 + TRIES_OF_PLACE):
        assert y.reason == ""
        fails(kind, y, worker_id)
        following = launched(y.wait(LONGEST_DELAY))
        assert following == ([worker_id + 1] if worker_id < 1 + TRIES_OF_PLACE else [])
    assert (y.end, y.wait(1000)) == ("", [])
    assert y.reason.startswith("4 workers in a row could not start, last worker 5: ")
    assert y.reason.endswith("detail" if kind == "without a word" else "960 samples, the job's 640")
    (warning,) = y.warnings
    assert warning.endswith("the job goes on with 1 worker, and tries again when it is scaled (`elasticdl scale`)")

    assert launched(y.exit(0) + y.wait(LONGEST_DELAY)) == [6], "the place of one that could train is filled"
    y.scale(1, 3)
    assert len([r for r in y.job.view().workers if r.state == "starting"]) == 3
    assert "could not start" not in y.reason


def test_tries_come_later_and_later_and_are_those_of_one_place():
    y = training_with_a_place_to_fill(maximum=3)
    y.leave(2)
    y.ask(0, left=2)
    pair = [3, 4]
    for delay in (0.5, 2.0, 8.0):
        for worker_id in pair:
            fail(y, worker_id)
        assert y.wait(0.9 * delay) == []
        pair = launched(y.wait(0.2 * delay))
        assert len(pair) == 2, "each place has tries of its own"
    fail(y, pair[0])
    assert y.reason.startswith("4 workers in a row could not start")
    y.come(pair[1])
    y.ask(0, left=3)
    assert len([w for w in y.job.view().workers if w.state == "member"]) == 2


def test_a_job_that_has_too_few_without_that_place_fails_for_that_reason_and_keeps_its_state():
    y = training_with_a_place_to_fill()
    y.scale(2, 2)
    for worker_id in range(2, 2 + TRIES_OF_PLACE):
        assert y.end == ""
        fail(y, worker_id, message="KeyError: 'label'")
        y.wait(LONGEST_DELAY)
    assert y.end == (
        "4 workers in a row could not start, last worker 5: KeyError: 'label'; the state is kept, and the same command goes on from it, "
        "with --num_workers 1-2 also on 1"
    )
    assert [(each.to, each.message.checkpoint) for each in only(m.StopWork, y.out)] == [((0,), True)]


@pytest.mark.parametrize("somebody_trained", [True, False])
def test_what_the_code_of_a_worker_raises_that_has_trained_or_before_anybody_has_ends_the_job(somebody_trained):
    y = training_with_a_place_to_fill() if somebody_trained else Yard(maximum=2)
    if not somebody_trained:
        y.start()
    fail(y, 0, trained=somebody_trained, message="KeyError: 'label'")
    assert y.end == "KeyError: 'label'"
