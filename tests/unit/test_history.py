"""A job's history: what is computed from its journal, whatever is in it."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from copy import deepcopy

import pytest
from history_kit import SPENT, STARTED, eventful, formed, launched, line, pause, steps
from hypothesis import example, given
from hypothesis import strategies as st

from elasticdl.job.facts import MOST_POINTS, Curve, Facts, Point, TimeUse, WorkerPhase
from elasticdl.job.journal import KINDS, SpeedupRow
from elasticdl.report.page import as_json, page_data


def read(lines, until=0.0):
    return Facts().read(lines).conclude(until)


def spent(history):
    return {str(doing): round(seconds, 6) for doing, seconds in history.spent.wall.items() if seconds}


def test_each_moment_of_a_job_counts_as_what_it_was():
    history = read(eventful())
    assert spent(history) == SPENT
    paid = {str(use): round(seconds, 6) for use, seconds in history.spent.workers.items()}
    assert paid == {"productive": 79, "slow": 2, "again": 10, "evaluation": 4, "checkpoint": 2, "grow": 9, "shrink": 6,
                    "failure": 6, "waiting": 19, "starting": 12.5, "ending": 15}  # fmt: skip
    pauses = [(each.world, each.kind, each.total, each.workers) for each in history.pauses]
    assert pauses == [(2, "grow", 4, 2), (3, "shrink", 3, 0), (4, "failure", 10, 1)]
    assert history.changes == {"starting": 2, "grow": 1, "shrink": 1, "failure": 1}
    assert (history.causes, history.counts["pauses"]) == ({"drained": 1, "killed": 1}, 3)
    worlds = [(each.version, each.members, each.since - STARTED, each.until - STARTED) for each in history.worlds]
    assert worlds == [
        (1, (0, 1), 4, 25), (2, (0, 1, 2), 25, 32), (3, (1, 2), 32, 40), (4, (2, 3), 48, 70), (5, (4,), 104, 116),
    ]  # fmt: skip
    lanes = [[(str(each.phase), round(each.since - STARTED, 1)) for each in lane.spans] for lane in history.lanes]
    assert lanes[0] == [("pending", 0), ("starting", 0.1), ("warm", 2), ("training", 4), ("leaving", 30)]
    assert [lane[-1] for lane in lanes[1:]] == [("training", 4), ("leaving", 65), ("leaving", 65), ("leaving", 112)]
    assert (history.lanes[0].host, history.lanes[0].cause, history.lanes[0].code) == ("node-0", "drained", 0)
    assert (history.steps_made, history.next_worker) == (85, 5)
    assert any("was stopped and went on" in each for each in history.remarks())


# ---- journals that nobody writes ----

number = st.floats() | st.integers(-5, 10**30) | st.just("x") | st.none() | st.booleans()
near, few = st.floats(0, 100, allow_nan=False) | number, st.integers(0, 5) | number
field = {
    **dict.fromkeys(("seconds", "total", "held", "slowest", "loss", "notice", "drain"), near),
    **dict.fromkeys(("worker", "world", "step", "steps", "again", "samples", "code"), few),
    "members": st.lists(st.integers(0, 5), max_size=4) | number,
    "kind": st.sampled_from(["grow", "shrink", "failure", "odd", None]),
    "phase": st.sampled_from(["pending", "running", "waiting", "stopping", "succeeded", "data", 3]),
    "metrics": st.dictionaries(st.text(max_size=3), number, max_size=2) | number,
    "curve": st.lists(st.lists(number, max_size=4), max_size=2) | number,
    "reason": st.text(max_size=5) | number,
}
named = {"event": st.sampled_from([*KINDS, "of_tomorrow"]), "time": st.floats(0, 1000)}


@given(st.lists(st.fixed_dictionaries(named, optional=field), max_size=30), st.booleans())
@example([], True)
def test_whatever_happens_the_parts_add_up_and_time_goes_on(entries, in_order):
    if in_order:
        entries = sorted(entries, key=lambda each: each["time"])
    history = Facts()
    before = deepcopy(history.spent)
    for each in entries:
        history.read([json.dumps(each)])
        now = deepcopy(history.spent)
        for ours, past in ((now.wall, before.wall), (now.workers, before.workers)):
            assert all(ours[doing] >= past[doing] for doing in TimeUse), "what is settled never falls"
        before = now
    found = history.conclude()
    as_json(page_data(found))
    if not found.counts:
        assert found.spent.productive == 0
        return
    now, between = entries[0]["time"], 0.0
    for each in entries:
        if each["event"] == "job_started":  # the training goes on, in another job
            between += max(0.0, each["time"] - now)
        now = max(now, each["time"])
    assert sum(found.spent.wall.values()) == pytest.approx(found.until - found.began - between, abs=1e-6)
    assert min(*found.spent.wall.values(), *found.spent.workers.values()) >= -1e-9
    assert all(before.wall[doing] <= found.spent.wall[doing] + 1e-6 for doing in TimeUse)
    there = 0.0
    for lane in found.lanes:
        for span, following in itertools.pairwise(lane.spans):
            assert span.since <= span.until == following.since
        spans = [span for span in lane.spans if span.phase is not WorkerPhase.PENDING]
        there += sum((span.until or found.until) - span.since for span in spans)
    assert sum(found.spent.workers.values()) == pytest.approx(there, rel=1e-6, abs=1e-6)
    for world, following in itertools.pairwise(found.worlds):
        assert world.since <= world.until <= following.since


@pytest.mark.slow
def test_a_long_journal_takes_little_memory():
    def endless():
        for version in range(1, 4101):
            now = 10 * version
            yield formed(now, version, range(version % 50), version)
            yield from launched(version, now)
            yield line(now + 3, "worker_left", worker=version, cause="crashed", reason="x" * 50, code=1)
            yield pause(now + 4, version, "grow", 0.1)
            yield steps(now + 5, version, 1, world=version)
            yield line(now + 6, f"of_tomorrow_{version}")
            yield line(now + 6, "warning", message="x" * 100)

    tracemalloc.start()
    history = read(endless())
    assert tracemalloc.get_traced_memory()[1] < 40e6
    tracemalloc.stop()
    assert history.counts["world_formed"] == history.counts["pauses"] == 4100
    assert any("only the newest" in remark for remark in history.remarks())


def test_a_curve_has_one_resolution_and_loses_no_sample():
    curve = Curve()
    for step in range(20_000):
        loss = None if step == 7 else float(step)
        curve.add(Point(step, 1, 1, 2, loss, 0.1, 0.5, 0, 0.0, time=float(step), workers=3))
    points = curve.points
    assert len(points) < MOST_POINTS
    assert sum(point.samples for point in points) == 40_000
    assert sum(point.seconds for point in points) == 10_000
    assert {point.steps for point in points[:-1]} == {8}
    assert points[1].loss == pytest.approx(sum(range(8, 16)) / 8)


# ---- journals with numbers ----

BEGUN = [
    line(0, "job_started", job="j", workers="1-4"),
    *sorted([*launched(0, 0), *launched(1, 0)], key=lambda text: json.loads(text)["time"]),
    formed(4, 1, [0, 1], 0),
    line(4, "phase", phase="running", reason=""),
]
START = [*BEGUN, steps(5, 1, 1, seconds=0)]
TRAINED = steps(10, 50, 49, seconds=5)  # after five seconds
OVER = line(15, "steps_over", step=50, seconds=5)


def phase(time, name):
    return line(time, "phase", phase=name, reason="why")


def broken(time):
    return line(time, "world_broken", world=1, reason="killed")


def finished(time, phase="succeeded"):
    return line(time, "job_finished", phase=phase, reason="done", steps=9)


@pytest.mark.parametrize(
    ("lines", "until", "wanted"),
    [
        # Before its pause is known, all from the break on is one; with slow steps it begins later.
        ([steps(80, 10, 9, seconds=75), broken(80), formed(82, 2, [0], 10, seconds=2), pause(93, 2, "failure", 3),
          steps(93, 11, 1, world=2, seconds=10)], 100, {"productive": 92, "failure": 3}),
        ([broken(60), formed(62, 2, [2], 1)], 90, {"productive": 55, "failure": 30}),
        # A world that a new master finds has trained meanwhile.
        ([steps(20, 90, 89), line(30, "master_restarted", world=2, members=[0, 1, 2], missing=[], seconds=8),
          steps(31, 200, 110, world=2)], 40, {"productive": 35}),
        # Nothing takes more than was trained by then; the checkpoint of a stop is part of the end.
        ([line(8, "evaluation", step=9, seconds=1e9)], 10, {"evaluation": 3, "productive": 2}),
        ([TRAINED, phase(10, "stopping"), line(14, "checkpoint", step=50, held=4.5), finished(15, "stopped")],
         0, {"productive": 4.5, "checkpoint": 0.5, "ending": 5}),
        # After the last step of one, others may have work left, for which the job waits, or recovers.
        ([TRAINED, phase(12, "waiting"), OVER], 20, {"productive": 5, "waiting": 8, "ending": 2}),
        ([TRAINED, broken(12), OVER, formed(20, 2, [0], 50), steps(21, 60, 10, world=2, seconds=1)],
         21, {"productive": 5 + 1, "failure": 5, "ending": 5}),
    ],
)  # fmt: skip
def test_where_the_time_went(lines, until, wanted):
    history = read([*START, *lines], until and STARTED + until)
    assert spent(history) == pytest.approx({"starting": 5, **wanted})
    assert spent(read(BEGUN, STARTED + 50)) == {"starting": 50}, "no step was made"


# ---- what else is told ----


def test_what_is_damaged_or_unknown_is_left_out_and_remarked():
    lines = ["\x00", "{", "[]", '{"event": 3, "time": 1}', '{"event": "x"}', '{"event": "x", "time": 1e999}', ""]
    odd = [line(6, "of_tomorrow", worker="?"), line(7, "pause", total="x"), line(7, "steps", steps=[], loss="nan")]
    history = read([*START, *lines, *odd, line(5.5, "warning", message="late")], STARTED + 10)
    assert spent(history) == {"starting": 5, "productive": 5}
    said = " ".join(history.remarks())
    assert all(part in said for part in ("left out: 6", "does not know: 1"))
    cut = read(START[7:], STARTED + 10)
    assert "beginning" in next(cut.remarks())
    assert sum(cut.spent.wall.values()) == pytest.approx(cut.until - cut.began) == pytest.approx(6)


def test_advice_and_trouble_are_kept_as_they_come():
    row = {"workers": 2, "speedup": 1.8, "measured": True}
    lines = [*START, line(6, "collective", worker=0, engine="torch"),
             line(6, "advice", text="4 would do", curve=[row, [1], {"workers": 3}]),
             line(7, "worker_stuck", worker=0, host="h", seconds=31, where="train.py:31 in load", stack=["a"]),
             line(8, "worker_recovered", worker=0), line(9, "decision", workers=2, reason="enough")]  # fmt: skip
    history = read(lines)
    assert (history.advice, history.speedup) == ("4 would do", [SpeedupRow(**row)])
    assert (history.target, history.decision, history.wanted) == (2, "enough", "1-4")
    assert history.collective == read([*lines, finished(20)]).collective == "torch"  # as the end of an older version
    told = {"collective": "horovod", "compared": 8, "compared_workers": 2}
    over = read([*lines, line(20, "job_finished", phase="succeeded", steps=9, **told)])
    assert (over.collective, over.compared) == ("horovod", (8, 2))
    assert [mark.event for mark in history.marks] == ["phase", "worker_stuck", "worker_recovered", "decision"]
