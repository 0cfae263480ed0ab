"""A job's history: what is computed from a journal, whatever is in it."""

from __future__ import annotations

import json

import pytest
from history_kit import STARTED, formed, launched, line, pause, steps

from elasticdl.job.facts import Facts, TimeUse, WorkerPhase
from elasticdl.job.journal import SpeedupRow


def read(lines, until=0.0):
    return Facts().read(lines).conclude(until)


def spent(history):
    return {str(doing): round(seconds, 6) for doing, seconds in history.spent.wall.items() if seconds}


def start(workers=2, ready=2.0):
    yield line(0, "job_started", job="j", workers="1-4")
    each = [text for worker in range(workers) for text in launched(worker, 0, ready)]
    yield from sorted(each, key=lambda text: json.loads(text)["time"])
    yield formed(4, 1, range(workers), 0)
    yield line(4, "phase", phase="running", reason="")
    yield steps(5, 1, 1, seconds=0)


def end(time, phase="succeeded"):
    yield line(time, "phase", phase="stopping", reason="training is complete")
    yield line(time + 1, "job_finished", phase=phase, reason="training is complete", steps=9, samples=99, epochs=1)


# ---- where the time went ----

TRAINED = steps(10, 50, 49, seconds=5)  # after five seconds
OVER = line(15, "steps_over", step=50, seconds=5)
ALONE = [each for each in start() if '"event": "steps"' not in each]  # a world that has made no step


def after(*lines, ends=None, until=0.0, begins=None):
    """A history, from its start on."""
    return read([*(begins or start()), *lines, *(() if ends is None else end(ends))], until and STARTED + until)


def phase(time, name):
    return line(time, "phase", phase=name, reason="why")


def broken(time, world=1):
    return line(time, "world_broken", world=world, reason="killed")


FAILED = [formed(30, 2, [2, 3], 0, seconds=10), steps(33, 50, 1, world=2, seconds=1, again=1)]
FAILURE = {"productive": 15 + 8 - 1, "failure": 12, "again": 1, "ending": 1}


@pytest.mark.parametrize(
    ("history", "wanted"),
    [
        pytest.param(after(TRAINED, ends=10), {"productive": 5, "ending": 1}, id="undisturbed"),
        pytest.param(after(TRAINED, until=20), {"productive": 15}, id="goes on"),
        pytest.param(
            after(TRAINED, phase(12, "waiting"), phase(15, "running"), ends=20),
            {"productive": 12, "waiting": 3, "ending": 1},
            id="waits and runs again",
        ),
        # From the break to the first step, whatever is told of steps as the world breaks.
        pytest.param(after(steps(19.9, 90, 89), broken(20), *FAILED, ends=40), FAILURE, id="nobody survived"),
        pytest.param(
            after(steps(19.5, 80, 79), broken(20), steps(20, 90, 10, seconds=0.5), *FAILED, ends=40),
            FAILURE,
            id="steps are told after the break",
        ),
        # Before its pause is known, all from the break on is one; with slow steps it begins later.
        pytest.param(
            after(
                steps(80, 10, 9, seconds=75),
                broken(80.05),
                formed(82, 2, [0], 10, seconds=1.95),
                pause(93, 2, "failure", 3),
                steps(93, 11, 1, world=2, seconds=10),
                ends=100,
            ),
            {"productive": 92, "failure": 3, "ending": 1},
            id="what a survivor tells takes the place of what was supposed",
        ),
        pytest.param(after(begins=ALONE, until=50), {"starting": 50}, id="no step yet"),
        pytest.param(
            after(broken(60), phase(61, "stopping"), line(62, "job_finished", phase="failed", steps=0), begins=ALONE),
            {"starting": 61, "ending": 1},
            id="no step ever",
        ),
        pytest.param(
            after(broken(60), formed(62, 2, [2], 1), until=90), {"productive": 55, "failure": 30}, id="not yet again"
        ),
        # A world that a new master finds has trained meanwhile.
        pytest.param(
            after(
                steps(20, 90, 89),
                line(30, "master_restarted", world=2, members=[0, 1, 2], missing=[], seconds=8),
                steps(31, 200, 110, world=2),
                ends=40,
            ),
            {"productive": 35, "ending": 1},
            id="a new master",
        ),
        pytest.param(
            after(
                broken(20),
                phase(20, "waiting"),
                formed(50, 2, [0, 2], 100),
                phase(50, "running"),
                pause(51, 2, "failure", 31.5),
                ends=61,
            ),
            {"productive": 14.5 + 10, "failure": 1.5, "waiting": 30, "ending": 1},
            id="too few workers is no pause",
        ),
        # What has no place in time is taken out of training; each of 40 steps counts once.
        pytest.param(
            after(
                line(8, "evaluation", step=9, seconds=1.5, metrics={"accuracy": 0.5, "odd": None}, worker=0),
                line(9, "checkpoint", step=9, path="x", seconds=3.0, held=0.25),
                steps(10, 50, 40, seconds=4, again=10, slowest=0.01),
                ends=10,
            ),
            {"productive": 5 - 3.05, "ending": 1, "evaluation": 1.5, "checkpoint": 0.25, "again": 1, "slow": 0.3},
            id="parts of training",
        ),
        pytest.param(
            after(line(8, "evaluation", step=9, seconds=1e9), ends=10),
            {"evaluation": 3, "productive": 2, "ending": 1},
            id="no more than was trained by then",
        ),
        pytest.param(
            after(
                TRAINED,
                phase(10, "stopping"),
                line(14, "checkpoint", step=50, path="x", held=4.5),
                line(15, "job_finished", phase="stopped", steps=50),
            ),
            {"productive": 4.5, "checkpoint": 0.5, "ending": 5},
            id="the checkpoint of a stop is part of the end",
        ),
        # It evaluates and saves for 5 s, says that there is no further step, and its processes end 2 s later.
        pytest.param(
            after(TRAINED, OVER, *[line(17, "worker_left", worker=n, cause="finished") for n in (0, 1)], ends=17),
            {"productive": 5, "ending": 8},
            id="after the last step",
        ),
        # Others may have work left, for which the job waits, or recovers.
        pytest.param(
            after(TRAINED, phase(12, "waiting"), OVER, ends=20),
            {"productive": 5, "waiting": 8, "ending": 2 + 1},
            id="the last step of one while the job waits",
        ),
        pytest.param(
            after(TRAINED, broken(12), OVER, formed(20, 2, [0], 50), steps(21, 60, 10, world=2, seconds=1), ends=21),
            {"productive": 5 + 1, "failure": 5, "ending": 5 + 1},
            id="the last step of one while the world is broken",
        ),
    ],
)
def test_where_the_time_went(history, wanted):
    assert spent(history) == pytest.approx({"starting": 5, **wanted})
    assert history.changes.get("failure", 1) == 1


def test_workers_have_times_of_their_own():
    """Two workers: pending and starting for 2 s each, ready for 2 s, in a world that has not stepped for 1 s."""
    history = after(TRAINED, ends=10)
    workers = {str(each): round(value, 6) for each, value in history.spent.workers.items() if value}
    assert workers == {"productive": 10, "starting": 2 * 1.9 + 2, "waiting": 4, "ending": 2}


@pytest.mark.parametrize("kind", ["grow", "shrink", "failure"])
def test_a_pause_is_what_the_survivor_tells_who_paused_longest(kind):
    change = [formed(19.8, 2, [0, 1, 2], 100, seconds=0.1), pause(20, 2, kind, 0.5), pause(20.01, 2, kind, 0.8, 1)]
    history = after(steps(19, 100, 99, seconds=14), *change, steps(20.2, 101, 1, world=2), ends=30)
    assert spent(history)[kind] == pytest.approx(0.8)  # from 19.21 to 20.01, in which the other's lies
    (found,) = history.pauses
    assert (found.workers, found.total, sum(found.parts.values())) == (2, 0.8, pytest.approx(0.8, abs=1e-4))


@pytest.mark.parametrize(
    ("told", "use", "wanted"),
    [
        pytest.param([pause(24, 2, "grow", 5)], "grow", 1 + 4 * 100, id="pause"),
        pytest.param([steps(24, 101, 1, world=2, seconds=0)], "grow", 1 + 4 * 100, id="change that no survivor tells"),
        pytest.param(
            [line(24, "evaluation", step=100, seconds=5, metrics={})], "evaluation", 1 + 4 * 100, id="evaluation"
        ),
        pytest.param([line(24, "checkpoint", step=100, path="x", held=5)], "checkpoint", 1 + 4 * 100, id="checkpoint"),
        pytest.param([line(24, "steps_over", step=100, seconds=5)], "ending", 1 + 4 * 100, id="the last step"),
    ],
)
def test_what_has_its_time_counts_for_the_workers_of_that_time(told, use, wanted):
    """One worker becomes a hundred at 20 s; what is told at 24 s began at 19 s."""
    grown = [formed(20, 2, range(100), 100, seconds=1), *told]
    history = after(steps(19, 100, 99, seconds=14), *grown, begins=start(1), until=24)
    before = after(steps(19, 100, 99, seconds=14), begins=start(1), until=19)
    assert history.spent.workers[use] - before.spent.workers[use] == pytest.approx(wanted)
    assert history.spent.wall[use] == pytest.approx(5)


@pytest.mark.parametrize("kind", ["grow", "shrink"])
@pytest.mark.parametrize("total", [0.96, 0.5])
def test_a_pause_that_is_told_after_its_first_step_counts_once(kind, total):
    """So after a reconnect. From the old world's last step to the first of the new one it is 0.7 s; a longer pause counts as told."""
    lines, sizes = [], [2 + number if kind == "grow" else 22 - number for number in range(21)]
    for number in range(1, 21):
        time, version = 10.0 * number, number + 1
        world = formed(time, version, range(sizes[number]), 100 * number, seconds=0.3)
        first = steps(time + 0.5, 100 * number + 1, 1, world=version, seconds=0.1)
        later = steps(time + 9, 100 * number + 99, 98, world=version, seconds=8.5)
        lines += [
            world,
            first,
            pause(time + 0.52, version, kind, total),
            pause(time + 0.53, version, kind, total - 0.1, 1),
            later,
        ]
    history = after(*lines, begins=start(sizes[0]), ends=220)
    assert history.spent.wall[kind] == pytest.approx(20 * max(total, 0.7))
    assert history.changes == {"starting": 1, kind: 20}
    assert history.counts["pauses"] == len(history.pauses) == 20
    assert {each.workers for each in history.pauses} == {2}


def test_what_sums_gradients_is_known_from_the_end_too():
    finished = line(20, "job_finished", phase="succeeded", steps=9, collective="horovod")
    assert read([*start(), TRAINED, finished][9:]).collective == "horovod"
    began = line(6, "collective", worker=0, engine="torch")
    assert after(began, TRAINED, ends=20).collective == "torch"  # the end of an older version may not tell it


@pytest.mark.parametrize("told", [False, True])
def test_a_failure_after_which_no_step_was_made_has_its_place_among_the_pauses(told):
    later = [pause(12, 2, "failure", 2.0), steps(13, 60, 10, world=2, seconds=1)] if told else []
    history = after(TRAINED, broken(10), formed(11, 2, [1], 50), *later, ends=14)
    assert [(each.kind, each.world) for each in history.pauses] == [("failure", 2)]
    assert history.changes["failure"] == 1


def test_when_the_last_member_is_killed_the_time_counts_as_a_failure_and_not_as_leaving():
    """Nobody is left who could leave the world, so the journal has no ``world_broken``."""
    gone = line(10, "worker_left", worker=0, cause="killed", code=-9)
    anew = [gone, formed(12, 2, [1], 0, seconds=2), steps(13, 1, 1, world=2, seconds=0)]
    history = after(steps(10, 50, 49, seconds=5), *anew, begins=start(1), ends=20)
    assert spent(history) == pytest.approx({"starting": 5, "productive": 5 + 7, "failure": 3, "ending": 1})
    assert history.changes == {"starting": 1, "failure": 1}
    (found,) = history.pauses
    assert (found.kind, found.world, found.total, found.workers) == ("failure", 2, pytest.approx(3), 0)


def test_a_training_that_was_stopped_and_goes_on_is_one_and_the_time_between_is_nobodys():
    first = [
        *start(),
        TRAINED,
        line(20, "worker_left", worker=0, cause="drained", reason="stopped", code=0),
        *end(20, "stopped"),
    ]
    second = [
        line(1000, "job_started", job="j", workers="2"),
        *launched(2, 1000),
        formed(1004, 1, [2], 50),
        line(1004, "phase", phase="running", reason=""),
        steps(1005, 51, 1, seconds=0),
        line(1010, "world_broken", world=1, reason="killed"),
        line(1010, "worker_left", worker=2, cause="killed", reason="killed", code=-9),
        steps(1011, 52, 1, world=2, seconds=1),
    ]
    facts = Facts().read([*first, *second])
    assert facts.next_worker == 3
    going = facts.conclude(STARTED + 1011)
    assert (going.phase, going.over, going.reason) == ("running", False, "")
    assert [(world.version, world.members) for world in going.worlds] == [(1, (0, 1)), (2, (2,))]
    assert [point.step for point in going.curve.points] == [1, 50, 51, 52]
    assert sum(going.spent.wall.values()) == pytest.approx(21 + 11)
    assert going.spent.wall[TimeUse.STARTING] == pytest.approx(5 + 5)
    assert [lane.worker for lane in going.lanes] == [0, 1, 2]
    assert going.causes == {"drained": 1, "killed": 1}
    assert "the training was stopped and went on, times: 1; what was between counts as nobody's time" in going.remarks()


@pytest.mark.parametrize("cause", ["drained", "clean", "finished"])
def test_a_last_member_that_leaves_in_good_order_is_no_failure(cause):
    gone = line(10, "worker_left", worker=0, cause=cause)
    anew = [gone, formed(12, 2, [1], 50, seconds=2), steps(13, 51, 1, world=2, seconds=0)]
    history = after(steps(10, 50, 49, seconds=5), *anew, begins=start(1), ends=20)
    assert history.changes == {"starting": 1, "shrink": 1}


def test_a_worker_that_was_lost_before_it_trained_breaks_no_world():
    gone = line(10, "worker_left", worker=7, cause="killed")
    history = after(gone, formed(12, 2, [0, 1, 2], 50, seconds=2), steps(13, 51, 1, world=2, seconds=0), ends=20)
    assert history.changes == {"starting": 1, "grow": 1}


def test_steps_that_are_told_twice_count_once():
    """A master that was started again is told the last steps once more."""
    once = [*start(), steps(10, 50, 49, seconds=5, again=10), steps(10.5, 55, 5, world=2, seconds=0.5)]
    told = [steps(11, 40, 39, seconds=4, again=10), steps(11, 50, 49, seconds=5, again=10), steps(11, 55, 5, world=2)]
    twice = read([*once, *told])
    assert twice.curve.points == read(once).curve.points
    assert twice.spent.wall[TimeUse.AGAIN] == read(once).spent.wall[TimeUse.AGAIN] > 0
    again = [*start(), TRAINED, steps(11, 50, 49, seconds=5), steps(12, 60, 10, seconds=1)]
    assert read(again).steps_made == 60


@pytest.mark.parametrize(
    ("lines", "phases"),
    [
        ([TRAINED], [("training", 4, None)]),
        ([TRAINED, OVER, line(17, "job_finished", phase="succeeded")], [("training", 4, 10), ("leaving", 10, 17)]),
        (
            [TRAINED, phase(10.1, "stopping"), line(12, "job_finished", phase="succeeded")],
            [("training", 4, 10.1), ("leaving", 10.1, 12)],
        ),
    ],
    ids=["goes on", "after its last step", "a job that ends"],
)
def test_until_when_a_worker_trains(lines, phases):
    for lane in after(*lines, until=20).lanes:
        spans = [(each.phase, each.since - STARTED, each.until and each.until - STARTED) for each in lane.spans[3:]]
        assert [(str(name), round(since, 1), until and round(until, 1)) for name, since, until in spans] == phases


def test_training_that_goes_on_after_all_is_training():
    more = [broken(16), formed(17, 2, (0, 1), 50), steps(20, 60, 10, world=2, seconds=2)]
    history = after(TRAINED, OVER, *more)
    assert history.lanes[0].spans[-1].phase is WorkerPhase.TRAINING
    assert spent(history)["productive"] >= 7


# ---- lanes, worlds, curves ----


def test_a_lane_tells_what_a_worker_was_and_how_it_ended():
    lines = [
        *start(),
        line(12, "worker_draining", worker=1, reason="the limit is lower"),
        formed(13, 2, [0], 100),
        line(14, "worker_left", worker=1, cause="drained", reason="was told to", code=0),
        line(15, "worker_slow", worker=0, host="h", phase="data", factor=2.0, seconds=0.1),
    ]
    history = read(lines)
    first, second = history.lanes
    posts = [
        (span.phase, round(span.since - STARTED, 1), span.until and round(span.until - STARTED, 1))
        for span in second.spans
    ]
    assert posts == [(WorkerPhase.PENDING, 0, 0.1), (WorkerPhase.STARTING, 0.1, 2), (WorkerPhase.WARM, 2, 4), (WorkerPhase.TRAINING, 4, 12), (WorkerPhase.LEAVING, 12, 14)]  # fmt: skip
    assert (second.cause, second.host, second.code) == ("drained", "node-1", 0)
    assert (history.slow, first.cause) == ({0: ("h", "data", 2.0)}, "")
    assert [(mark.event, mark.text) for mark in history.marks] == [("phase", "running"), ("worker_slow", "data")]
    assert [(world.version, len(world.members), world.until) for world in history.worlds] == [
        (1, 2, STARTED + 13),
        (2, 1, None),
    ]
    assert history.causes == {"drained": 1}


def test_a_new_master_finds_anew_who_is_slow():
    """It knows nothing of what an earlier one found, so it never tells that a worker recovered."""
    slow = line(15, "worker_slow", worker=0, phase="data")
    restarted = line(20, "master_restarted", world=1, members=[0, 1], missing=[], seconds=2)
    for entries, wanted in [((), [0]), ((restarted,), []), ((restarted, slow), [0])]:
        assert list(read([*start(), slow, *entries]).slow) == wanted


def test_advice_and_trouble_are_kept_as_they_come():
    lines = [*start(), line(6, "advice", text="4 would do", curve=[{"workers": 2, "speedup": 1.8, "measured": True}, [1], {"workers": 3}]),
             line(7, "worker_stuck", worker=0, host="h", seconds=31, where="train.py:31 in load", stack=["a"]),
             line(8, "worker_recovered", worker=0), line(9, "decision", workers=2, reason="enough")]  # fmt: skip
    history = read(lines)
    assert (history.advice, history.speedup) == ("4 would do", [SpeedupRow(workers=2, speedup=1.8, measured=True)])
    assert (history.target, history.decision) == (2, "enough")
    assert [mark.event for mark in history.marks if mark.event != "phase"] == [
        "worker_stuck",
        "worker_recovered",
        "decision",
    ]
    assert history.wanted == "1-4"
