"""A history of any journal: damaged, cut off, absurd, or so long that not all of it can be kept."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from copy import deepcopy

import pytest
from history_kit import formed, launched, line, pause, steps, storm
from hypothesis import given
from hypothesis import strategies as st
from test_history import end, read, spent, start

from elasticdl.job.facts import (
    MOST_POINTS,
    MOST_SHOWN,
    Curve,
    Facts,
    Lanes,
    Point,
    TimeUse,
    WorkerPhase,
)
from elasticdl.job.journal import KINDS, Fields
from elasticdl.report.page import page_data


def test_what_is_damaged_or_unknown_is_left_out_and_remarked():
    lines = ["\x00", "{", "[]", '{"event": 3, "time": 1}', '{"event": "x"}', '{"event": "x", "time": 1e999}', ""]
    odd = [line(6, "of_tomorrow", worker="?"), line(7, "pause", total="x"), line(7, "steps", steps=[], loss="nan")]
    history = read([*start(), *lines, *odd, line(5.5, "warning", message="late"), *end(10)])
    assert spent(history) == {"starting": 5, "productive": 5, "ending": 1}
    said = " ".join(history.remarks())
    assert all(part in said for part in ("left out: 6", "does not know: 1"))


def test_only_what_entries_may_have_is_read_of_them():
    assert set(Fields.model_fields) - {"time", "event"} <= {name for kind in KINDS.values() for name in kind.fields}


def test_a_journal_without_its_beginning_counts_from_its_first_entry():
    history = read([*start(), steps(10, 50, 49), *end(20)][9:])
    assert "beginning" in next(history.remarks())
    assert sum(history.spent.wall.values()) == pytest.approx(history.until - history.began)
    assert read([]).spent.productive == 0


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
    if not found.counts:
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


def test_reading_in_parts_is_reading_at_once():
    lines = storm(worlds=30, workers=10)
    history = Facts()
    for each in lines:
        history.read([each])
        deepcopy(history).conclude()
    assert page_data(history.conclude()) == page_data(read(lines))


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
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6
    assert history.counts["world_formed"] == history.counts["pauses"] == 4100
    assert len(history.curve.points) <= MOST_POINTS
    assert any("only the newest" in remark for remark in history.remarks())
    assert sum(history.spent.wall.values()) == pytest.approx(history.until - history.began)


# ---- the pieces ----


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


def test_lanes_are_bounded():
    lanes = Lanes()
    for worker in range(MOST_SHOWN + 10):
        lanes.leave(worker + 2, 1.0, "", "", None)
    assert len(lanes.gone) == MOST_SHOWN
