"""How long replacements wait for what became of others: events in, launches out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from master_kit import Yard, launched

from elasticdl.job import messages as m
from elasticdl.master.core import events as e
from elasticdl.master.core.events import ExitCause
from elasticdl.master.core.fleet import BURST, LEAST_BURST, LEAST_RATE, LONGEST_DELAY, LONGEST_OF_NODE, RATE
from elasticdl.master.core.values import CRASHES_IN_TRAINING

BY_OTHERS = [ExitCause.PREEMPTED, ExitCause.EVICTED, ExitCause.NODE_LOST, ExitCause.DELETED, ExitCause.KILLED]
# After the first, of which the replacement does not wait.
WAITS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)
TICK = 0.25


def waiting(maximum=1):
    y = Yard(maximum=maximum)
    y.wait()
    return y


def lose_next(y, cause=ExitCause.EVICTED, node=""):
    """The newest worker, before it has reached a world; seconds until another is launched."""
    began, out = y.now, y.exit(max(y.ids), cause, 1, node)
    while not launched(out):
        out = y.wait(TICK)
    return y.now - began


def test_one_worker_after_another_that_gets_nowhere_is_replaced_later_and_later_of_each_cause_for_itself():
    y = waiting()
    for seconds in (0, *WAITS):
        assert [lose_next(y, cause) for cause in BY_OTHERS] == [seconds] * len(BY_OTHERS)
    assert y.end == ""


def test_so_is_one_that_is_told_to_leave_by_the_cluster_before_it_is_ready():
    y, waits = waiting(), []
    for worker_id in range(4):
        y.connect(worker_id)
        began, out = (
            y.now,
            y.post(e.FromWorker(worker_id, m.Draining("SIGTERM"))) + y.exit(worker_id, ExitCause.EVICTED, 0),
        )
        while not launched(out):
            out = y.wait(TICK)
        waits.append(y.now - began)
    assert waits == [0, *WAITS[:3]]


@pytest.mark.parametrize("cause", BY_OTHERS)
def test_workers_that_have_been_in_a_world_are_replaced_at_once_however_often(cause):
    y = Yard(maximum=2)
    y.start()
    for worker_id in range(1, 1 + 2 * CRASHES_IN_TRAINING):
        out = y.exit(worker_id, cause, 1) + y.ask(0, left=y.job.rendezvous.version)
        assert launched(out + y.wait()) == [worker_id + 1]
        y.come(worker_id + 1)
        y.wait(0.2)
        y.ask(0, left=y.job.rendezvous.version)
        y.wait(2)
    assert (set(y.causes), y.end, y.reason) == ({str(cause)}, "", "")


def test_those_that_are_lost_together_count_as_one():
    y = Yard(maximum=50)
    first = launched(y.wait())
    second = [worker for lost in first for worker in launched(y.exit(lost, ExitCause.PREEMPTED))]
    assert len(second) == 50, "a storm that takes all of them while they start is not felt"
    assert [worker for lost in second for worker in launched(y.exit(lost, ExitCause.PREEMPTED))] == []
    assert len(launched(y.wait(1))) == 50


def test_of_many_that_wait_one_tries_and_the_others_come_after_it_if_it_is_not_lost():
    y, launches = waiting(20), []
    while y.now < 120:
        for worker_id in y.ids:
            y.exit(worker_id, ExitCause.EVICTED)
        launches += [y.now] * len(launched(y.wait(TICK)))
    assert sum(at > 4 for at in launches) <= 8
    while not (first := launched(y.wait(TICK))):
        pass
    assert len(first) == 1
    together = [len(launched(y.wait(TICK))) for _ in range(int(LONGEST_DELAY / TICK))]
    assert (sum(together), max(together)) == (19, 1)


def test_a_replacement_that_reaches_a_world_ends_the_row_and_the_waiting_of_the_others():
    y = waiting(2)
    for _ in range(7):
        for worker_id in y.ids:
            y.exit(worker_id, ExitCause.EVICTED)
        y.wait(LONGEST_DELAY)
    first, second = y.ids
    assert launched(y.exit(first, ExitCause.EVICTED)) == []
    assert y.reason.endswith("15 workers in a row were lost before training, the last evicted: detail")
    assert "replacements wait 30 s: " in y.reason
    assert launched(y.come(second) + y.wait(1)) == [second + 1]
    assert y.reason == "", "what is over is not shown"
    assert lose_next(y) == 0


def test_a_person_sees_why_replacements_wait_and_is_told_once():
    y = waiting()
    for _ in range(4):
        assert "replacements" not in y.reason
        lose_next(y)
    for _ in range(4):
        y.exit(max(y.ids), ExitCause.EVICTED)
        assert "replacements wait " in y.reason
        y.wait(LONGEST_DELAY)
    assert y.warnings == [
        "replacements wait 8 s: 6 workers in a row were lost before training, the last evicted: detail"
    ]


def test_replacements_are_kept_off_a_node_that_loses_one_after_another_until_a_worker_of_it_trains():
    y = waiting(2)
    y.exit(1, ExitCause.EVICTED, node="n1")
    y.exit(max(y.ids), ExitCause.EVICTED, 1, "n1")
    (launch,) = y.wait(1)
    assert launch.away_from == ("n1",)
    y.place(launch.worker_id, "n1")
    y.come(0, launch.worker_id)
    y.wait(1)
    y.exit(0, ExitCause.EVICTED, node="n2")
    y.ask(launch.worker_id, left=1)
    (launch,) = y.wait()
    assert launch.away_from == ()


def test_where_there_is_no_other_node_it_is_tried_less_and_less_and_a_person_sees_it_who_may_scale_the_job():
    y = waiting()
    waits = [lose_next(y, node="n1") for _ in range(13)]
    assert waits == [0, 0.5, 1, 2, 4, 8, 16, 30, 32, 64, 128, 256, LONGEST_OF_NODE]
    y.exit(13, ExitCause.EVICTED, node="n1")
    y.wait(20)
    assert y.reason == (
        "workers are starting; 14 workers in a row were lost on node n1 before training, the last evicted: detail; the node is "
        "avoided, and tried again in 280 s"
    )
    (message,) = y.warnings
    assert message.endswith("the node is avoided, and tried again in 8 s")
    assert [(each.worker_id, each.away_from) for each in y.scale(1, 2)] == [(14, ()), (15, ())]


DEATHS = st.lists(
    st.tuples(st.sampled_from([*BY_OTHERS, ExitCause.CLEAN]), st.booleans(), st.sampled_from([0.0, 0.1, 1.0])),
    min_size=1,
    max_size=6,
)


def most_launches(maximum, seconds):
    return maximum + BURST * maximum + LEAST_BURST + seconds * max(LEAST_RATE, RATE * maximum) + 1


@pytest.mark.parametrize(("maximum", "rounds"), [(1, 40), (10, 5)])
@given(deaths=DEATHS)
def test_however_workers_die_launches_are_bounded(maximum, rounds, deaths):
    """All workers die, again and again, of these causes in turn, some as soon as they are in a world."""
    y = Yard(maximum=maximum)
    launches = [y.now] * len(launched(y.wait()))
    for number in range(rounds):
        cause, trains, pause = deaths[number % len(deaths)]
        ids = y.ids
        if trains:
            y.come(*ids)
            y.wait(0.2)
        for worker_id in ids:
            out = y.leave(worker_id) if cause is ExitCause.CLEAN else y.exit(worker_id, cause, 1)
            launches += [y.now] * len(launched(out))
        launches += [y.now] * len(launched(y.wait(pause)))
    for began in {launches[0], launches[len(launches) // 2]}:
        for seconds in (10, 60):
            assert sum(began <= at < began + seconds for at in launches) <= most_launches(maximum, seconds)


@pytest.mark.parametrize("maximum", [1, 4, 200])
def test_a_thousand_workers_that_die_in_a_world_at_once_are_replaced_at_a_bounded_rate(maximum):
    y = Yard(maximum=maximum)
    launches = len(launched(y.wait()))
    for _ in range(1000 // maximum):
        ids = y.ids
        y.come(*ids)
        y.wait(0.2)
        for worker_id in ids:
            launches += len(launched(y.exit(worker_id, ExitCause.PREEMPTED)))
        launches += len(launched(y.wait()))
    assert min(4 * maximum, most_launches(maximum, 0) - 1) <= launches <= most_launches(maximum, y.now)
