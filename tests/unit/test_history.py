"""A job's history: what is computed from a journal, whatever is in it."""

from __future__ import annotations

import itertools
import json
import tracemalloc

import pytest
from history_kit import STARTED, formed, launched, line, pause, steps, storm
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticdl.job.bounded import MOST_POINTS, CappedList, Curve
from elasticdl.job.event_catalogue import FORMAT, KINDS
from elasticdl.job.facts import Facts
from elasticdl.job.history import Point, TimeUse, WorkerPhase
from elasticdl.job.journal import thinned
from elasticdl.job.lanes import MOST_LANES, MOST_SPANS, Lanes
from elasticdl.job.timeline import MOST_SEGMENTS, Crew, Timeline


def read(lines, until=0.0):
    history = Facts()
    history.read(lines)
    return history.result(until)


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


def test_a_job_without_disturbance_starts_trains_and_ends():
    history = read([*start(), steps(10, 50, 49, seconds=5), *end(10)])
    assert spent(history) == {"starting": 5, "productive": 5, "ending": 1}
    # Two workers: pending and starting for 2 s each, ready for 2 s, in a world that has not stepped for 1 s.
    workers = {str(each): round(value, 6) for each, value in history.spent.workers.items() if value}
    assert workers == {"productive": 10, "starting": 2 * 1.9 + 2, "waiting": 4, "ending": 2}


def test_a_job_that_waits_and_runs_again_has_waited_for_so_long():
    phases = [line(12, "phase", phase="waiting", reason="1 of 2"), line(15, "phase", phase="running", reason="")]
    history = read([*start(), steps(10, 50, 49, seconds=5), *phases, *end(20)])
    assert spent(history) == {"starting": 5, "productive": 12, "waiting": 3, "ending": 1}


@pytest.mark.parametrize("kind", ["grow", "shrink", "failure"])
def test_a_pause_is_what_the_survivor_tells_who_paused_longest(kind):
    change = [formed(19.8, 2, [0, 1, 2], 100, seconds=0.1), pause(20, 2, kind, 0.5), pause(20.01, 2, kind, 0.8, 1)]
    history = read([*start(), steps(19, 100, 99, seconds=14), *change, steps(20.2, 101, 1, world=2), *end(30)])
    assert spent(history)[kind] == pytest.approx(0.8)  # from 19.21 to 20.01, in which the other's lies
    (found,) = history.pauses
    assert (found.workers, found.total, sum(found.parts.values())) == (2, 0.8, pytest.approx(0.8, abs=1e-4))


def test_a_failure_that_nobody_survived_lasts_from_the_break_to_the_first_step():
    change = [line(20, "world_broken", world=1, reason="killed"), formed(30, 2, [2, 3], 0)]
    history = read([*start(), steps(19.9, 90, 89), *change, steps(33, 50, 1, world=2, seconds=1, again=1), *end(40)])
    assert spent(history) == {"starting": 5, "productive": 15 + 8 - 1, "failure": 12, "again": 1, "ending": 1}


def test_steps_that_are_told_as_their_world_breaks_do_not_end_the_failure():
    """The master tells what it has of them after the break."""
    broken = [line(20, "world_broken", world=1, reason="killed"), steps(20, 90, 10, seconds=0.5)]
    again = [formed(30, 2, [2, 3], 0, seconds=10), steps(33, 50, 1, world=2, seconds=1, again=1)]
    history = read([*start(), steps(19.5, 80, 79), *broken, *again, *end(40)])
    assert spent(history) == {"starting": 5, "productive": 15 + 8 - 1, "failure": 12, "again": 1, "ending": 1}
    assert history.changes["failure"] == 1


def test_what_a_survivor_tells_takes_the_place_of_what_was_supposed():
    """Before its pause is known, all from the break on is one; with slow steps it begins later."""
    change = [line(80.05, "world_broken", world=1, reason="killed"), formed(82, 2, [0], 10, seconds=1.95)]
    told = [pause(93, 2, "failure", 3), steps(93, 11, 1, world=2, seconds=10)]
    history = read([*start(), steps(80, 10, 9, seconds=75), *change, *told, *end(100)])
    assert spent(history) == {"starting": 5, "productive": 92, "failure": 3, "ending": 1}


def test_a_world_that_never_made_a_step_did_not_train():
    broken = line(60, "world_broken", world=1, reason="killed")
    failed = [line(61, "phase", phase="stopping", reason=""), line(62, "job_finished", phase="failed", steps=0)]
    first = [each for each in start() if '"event": "steps"' not in each]
    assert spent(read(first, until=STARTED + 50)) == {"starting": 50}
    history = read([*first, broken, *failed])
    assert spent(history) == {"starting": 61, "ending": 1}
    assert not any("no steps" in remark for remark in history.remarks)
    assert spent(read([*start(), broken, formed(62, 2, [2], 1)], until=STARTED + 90)) == {"starting": 5, "productive": 55, "failure": 30}  # fmt: skip


def test_a_world_that_a_new_master_finds_has_trained_meanwhile():
    found = line(30, "master_restarted", world=2, members=[0, 1, 2], missing=[], seconds=8)
    history = read([*start(), steps(20, 90, 89), found, steps(31, 200, 110, world=2), *end(40)])
    assert spent(history) == {"starting": 5, "productive": 35, "ending": 1}


def test_too_few_workers_is_waiting_and_not_a_pause():
    lines = [
        *start(),
        line(20, "world_broken", world=1, reason="killed"),
        line(20, "phase", phase="waiting", reason="1 of 2 workers"),
        formed(50, 2, [0, 2], 100),
        line(50, "phase", phase="running", reason=""),
        pause(51, 2, "failure", 31.5),
        *end(61),
    ]
    assert spent(read(lines)) == {"starting": 5, "productive": 14.5 + 10, "failure": 1.5, "waiting": 30, "ending": 1}


def test_what_has_no_place_in_time_is_taken_out_of_training():
    lines = [
        *start(),
        line(8, "evaluation", step=9, seconds=1.5, metrics={"accuracy": 0.5, "odd": None}, worker=0),
        line(9, "checkpoint", step=9, path="x", seconds=3.0, held=0.25),
        steps(10, 50, 40, seconds=4, again=10, slowest=0.01),
        *end(10),
    ]
    times = {"evaluation": 1.5, "checkpoint": 0.25, "again": 1, "slow": 0.3}  # each of 40 steps counts once
    assert spent(read(lines)) == {"starting": 5, "productive": pytest.approx(5 - 3.05), "ending": 1, **times}


def test_the_checkpoint_with_which_a_job_is_stopped_is_part_of_its_end():
    stopped = [
        line(10, "phase", phase="stopping", reason="asked to"),
        line(14, "checkpoint", step=50, path="x", held=4.5),
    ]
    history = read(
        [*start(), steps(10, 50, 49, seconds=5), *stopped, line(15, "job_finished", phase="stopped", steps=50)]
    )
    assert spent(history) == {"starting": 5, "productive": 4.5, "checkpoint": 0.5, "ending": 5}


def test_steps_that_are_told_twice_count_once():
    """A master that was started again is told the last steps once more."""
    once = [*start(), steps(10, 50, 49, seconds=5, again=10)]
    once.append(steps(10.5, 55, 5, world=2, seconds=0.5))
    told = [steps(11, 40, 39, seconds=4, again=10), steps(11, 50, 49, seconds=5, again=10), steps(11, 55, 5, world=2)]
    twice = read([*once, *told])
    assert twice.points == read(once).points
    assert twice.spent.wall[TimeUse.AGAIN] == read(once).spent.wall[TimeUse.AGAIN] > 0


def test_more_than_there_was_is_not_taken():
    history = read([*start(), line(8, "evaluation", step=9, seconds=1e9), *end(10)])
    assert spent(history) == {"starting": 5, "evaluation": 5, "ending": 1}


def test_a_job_that_goes_on_is_told_up_to_now():
    history = read([*start(), steps(10, 50, 49)], until=STARTED + 20)
    assert spent(history) == {"starting": 5, "productive": 15}
    assert (history.over, history.lanes[0].spans[-1].until) == (False, None)


def test_what_a_script_does_after_its_last_step_is_no_training():
    """It evaluates and saves for 5 s, says that there is no further step, and its processes end 2 s later."""
    left = [line(17, "worker_left", worker=worker, cause="finished") for worker in (0, 1)]
    over = line(15, "steps_over", step=50, seconds=5)
    history = read([*start(), steps(10, 50, 49, seconds=5), over, *left, *end(17)])
    assert spent(history) == {"starting": 5, "productive": 5, "ending": 8}
    for lane in history.lanes:
        last = [(str(each.phase), each.since - STARTED, each.until - STARTED) for each in lane.spans[-2:]]
        assert last == [("training", 4, 10), ("leaving", 10, 17)]


def test_nobody_trains_in_a_job_that_ends():
    """Its workers export and leave, which takes as long as it takes."""
    history = read([*start(), steps(10, 50, 49, seconds=5), line(10.1, "phase", phase="stopping", reason="done"), line(12, "job_finished", phase="succeeded")])  # fmt: skip
    for lane in history.lanes:
        assert [str(each.phase) for each in lane.spans][-2:] == ["training", "leaving"]
        assert round(lane.spans[-1].since - STARTED, 1) == 10.1


def test_a_journal_of_a_version_that_can_not_be_known_is_read_with_a_remark():
    for version, told in [(None, 0), ("1.0", 0), (FORMAT, 0), ("1.2", 0), ("1.3", 1), ("2.0", 1), ("odd", 1)]:
        history = read([line(0, "job_started", job="j", workers="1", **({"format": version} if version else {}))])
        assert sum("newer version" in remark for remark in history.remarks) == told, version


@st.composite
def courses(draw):
    """Lines of jobs with steps, evaluations and changes of workers, as a master writes them."""
    now, step, world, lines = 5.0, 1, 1, [*start()]
    for _ in range(draw(st.integers(0, 25))):
        now += draw(st.integers(1, 8)) / 4
        match draw(st.sampled_from(["steps", "steps", "steps", "evaluation", "checkpoint", "change", "slow"])):
            case "steps":
                made = draw(st.integers(1, 9))
                step += made
                lines.append(
                    steps(now, step, made, world=world, seconds=made / 32, again=draw(st.integers(0, 1)), slowest=0.01)
                )
            case "evaluation":
                lines.append(line(now, "evaluation", step=step, seconds=0.125, metrics={"accuracy": now}, worker=0))
            case "checkpoint":
                lines.append(line(now, "checkpoint", step=step, path=f"/{step}", seconds=0.1, held=0.0625, worker=0))
            case "slow":
                lines.append(line(now, "worker_slow", worker=1, host="h", phase="data", factor=2.0, seconds=0.1))
            case "change":
                world, step = world + 1, step + 1
                kind = draw(st.sampled_from(["grow", "shrink"]))
                lines += [formed(now, world, [0, 1], step - 1, seconds=0.1), pause(now + 0.25, world, kind, 0.3)]
                lines.append(steps(now + 0.3, step, 1, world=world, seconds=0))
                now += 0.3
    return [*(text + "\n" for text in lines), *(text + "\n" for text in end(now + 1))]


@settings(max_examples=50, deadline=None)
@given(courses(), st.integers(2, 9))
def test_a_thinned_journal_tells_the_facts_of_the_whole(lines, bunch):
    whole, thin = read(lines), read(thinned(lines, bunch))
    for name in ("phase", "step", "steps_made", "samples_made", "metrics", "checkpoint", "wanted", "over", "slow", "lanes", "worlds",
                 "pauses", "marks", "causes", "changes", "remarks"):  # fmt: skip
        assert getattr(whole, name) == getattr(thin, name), name
    assert {**whole.counts, "steps": 0} == {**thin.counts, "steps": 0}
    assert spent(thin) == pytest.approx(spent(whole), abs=1e-3)


def test_steps_that_another_master_was_told_once_more_count_once_in_a_thinned_journal_too():
    lines = [*start(), steps(10, 50, 49, seconds=5), steps(11, 50, 49, seconds=5), steps(12, 60, 10, seconds=1)]
    assert read(thinned(lines, 9)).steps_made == read(lines).steps_made == 60


def test_training_that_goes_on_after_all_is_training():
    over = line(15, "steps_over", step=50, seconds=5)
    more = [
        line(16, "world_broken", world=1, reason=""),
        formed(17, 2, (0, 1), 50),
        steps(20, 60, 10, world=2, seconds=2),
    ]
    history = read([*start(), steps(10, 50, 49, seconds=5), over, *more])
    assert history.lanes[0].spans[-1].phase is WorkerPhase.TRAINING
    assert spent(history)["productive"] >= 7


@pytest.mark.parametrize("told", [False, True])
def test_a_failure_after_which_no_step_was_made_has_its_place_among_the_pauses(told):
    lost = [line(10, "world_broken", world=1, reason="killed"), formed(11, 2, [1], 50)]
    after = [pause(12, 2, "failure", 2.0), steps(13, 60, 10, world=2, seconds=1)] if told else []
    history = read([*start(), steps(10, 50, 49, seconds=5), *lost, *after, *end(14)])
    assert [(each.kind, each.world) for each in history.pauses] == [("failure", 2)]
    assert history.changes["failure"] == 1


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
    assert (first.trouble, first.cause) == ("slow data", "")
    assert [(mark.event, mark.text) for mark in history.marks] == [("phase", "running"), ("worker_slow", "data")]
    assert [(world.version, world.size, world.until) for world in history.worlds] == [
        (1, 2, STARTED + 13),
        (2, 1, None),
    ]
    assert history.causes == {"drained": 1}


def test_a_new_master_finds_anew_who_is_slow_or_stuck():
    """It knows nothing of what an earlier one found, so it never tells that a worker recovered."""
    slow, stuck = line(15, "worker_slow", worker=0, phase="data"), line(16, "worker_stuck", worker=1, where="x.py:31")
    restarted = line(20, "master_restarted", world=1, members=[0, 1], missing=[], seconds=2)
    for entries, wanted in [((), ["slow data", "stuck at x.py:31"]), ((restarted,), ["", ""]), ((restarted, slow), ["slow data", ""])]:  # fmt: skip
        assert [lane.trouble for lane in read([*start(), slow, stuck, *entries]).lanes] == wanted


def test_who_has_not_reached_the_master_is_told_so_until_it_is_ready():
    entry = line(2, "worker_stuck", worker=1, why="has not reached the master", state="at m:1: no answer")
    started, ready = line(1, "worker_started", worker=1, host="h"), line(9, "worker_ready", worker=1)
    assert read([started, entry]).lanes[0].trouble == "has not reached the master at m:1: no answer"
    assert read([started, entry, ready]).lanes[0].trouble == ""


def test_advice_and_trouble_are_kept_as_they_come():
    lines = [*start(), line(6, "advice", text="4 would do", curve=[{"workers": 2, "speedup": 1.8, "low": 1.7, "high": 1.9, "gain": 0.8}, [1], {"workers": 3}]),
             line(7, "worker_stuck", worker=0, host="h", seconds=31, where="train.py:31 in load", stack=["a"]),
             line(8, "worker_recovered", worker=0), line(9, "decision", workers=2, reason="enough")]  # fmt: skip
    history = read(lines)
    assert (history.advice, history.speedup) == ("4 would do", ((2, 1.8, 1.7, 1.9),))
    assert (history.target, history.decision) == (2, "enough")
    assert [mark.event for mark in history.marks if mark.event != "phase"] == [
        "worker_stuck",
        "worker_recovered",
        "decision",
    ]
    assert (history.lanes[0].trouble, history.wanted) == ("", "1-4")


# ---- journals as they are ----


def test_what_is_damaged_or_unknown_is_left_out_and_remarked():
    lines = ["\x00", "{", "[]", '{"event": 3, "time": 1}', '{"event": "x"}', '{"event": "x", "time": 1e999}', ""]
    odd = [line(6, "of_tomorrow", worker="?"), line(7, "pause", total="x"), line(7, "steps", steps=[], loss="nan")]
    history = read([*start(), *lines, *odd, line(5.5, "warning", message="late"), *end(10)])
    assert spent(history) == {"starting": 5, "productive": 5, "ending": 1}
    said = " ".join(history.remarks)
    assert "left out: 6" in said
    assert "1 (of_tomorrow)" in said
    assert "go back: 1;" in said


def test_a_journal_without_its_beginning_counts_from_its_first_entry():
    history = read([*start(), steps(10, 50, 49), *end(20)][9:])
    assert "beginning" in history.remarks[0]
    assert sum(history.spent.wall.values()) == pytest.approx(history.until - history.began)


def test_a_journal_of_an_older_version_tells_no_curves():
    history = read(
        [each for each in [*start(), *end(10)] if '"steps", "step"' not in each and '"event": "steps"' not in each]
    )
    assert spent(history) == {"starting": 4, "productive": 6, "ending": 1}
    assert any("no curves" in remark for remark in history.remarks)


def test_nothing_at_all_is_a_history_too():
    assert read([]).spent.productive == 0


number = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(-5, 10**30), st.just("x"), st.none(), st.booleans()
)
near = st.floats(0, 100, allow_nan=False)
field = {
    **{
        name: st.one_of(near, number)
        for name in ("seconds", "total", "held", "slowest", "waited", "loss", *("notice", "drain"))
    },
    **{
        name: st.one_of(st.integers(0, 5), number)
        for name in ("worker", "world", "step", "steps", "again", "samples", "code")
    },
    "members": st.one_of(st.lists(st.integers(0, 5), max_size=4), number),
    "kind": st.sampled_from(["grow", "shrink", "failure", "odd", None]),
    "phase": st.sampled_from(["pending", "running", "waiting", "stopping", "succeeded", "data", 3]),
    "metrics": st.one_of(st.dictionaries(st.text(max_size=3), number, max_size=2), number),
    "curve": st.one_of(st.lists(st.lists(number, max_size=4), max_size=2), number),
    "reason": st.one_of(st.text(max_size=5), number),
}
entry = st.fixed_dictionaries(
    {"event": st.sampled_from([*KINDS, "of_tomorrow"]), "time": st.floats(0, 1000)}, optional=field
)


@given(st.lists(entry, max_size=30), st.booleans())
def test_whatever_happens_the_parts_add_up_and_time_goes_on(entries, in_order):
    if in_order:
        entries = sorted(entries, key=lambda each: each["time"])
    history = Facts()
    before = history.settled()
    for each in entries:
        history.read([json.dumps(each)])
        now = history.settled()
        assert all(now.wall[doing] >= before.wall[doing] for doing in TimeUse), "what is settled never falls"
        assert all(now.workers[doing] >= before.workers[doing] for doing in TimeUse)
        before = now
    found = history.result()
    if not found.counts.get("job_started") and not any(found.counts.values()):
        return
    wall = found.until - found.began
    assert sum(found.spent.wall.values()) == pytest.approx(wall, abs=1e-6)
    assert min(found.spent.wall.values()) >= -1e-9
    assert min(found.spent.workers.values()) >= -1e-9
    assert all(before.wall[doing] <= found.spent.wall[doing] + 1e-6 for doing in TimeUse)
    there = 0.0
    for lane in found.lanes:
        for span, following in itertools.pairwise(lane.spans):
            assert span.since <= span.until == following.since
        there += sum(
            (span.until or found.until) - span.since for span in lane.spans if span.phase is not WorkerPhase.PENDING
        )
    assert sum(found.spent.workers.values()) == pytest.approx(there, rel=1e-6, abs=1e-6)
    for world, following in itertools.pairwise(found.worlds):
        assert world.since <= world.until <= following.since


@given(st.integers(0, 10_000), st.integers(1, 10))
def test_a_journal_that_is_cut_off_anywhere_still_adds_up(cut, seed):
    text = "\n".join(storm(worlds=6, workers=5, seed=seed))
    history = read(text[: cut * len(text) // 10_000].split("\n"))
    assert sum(history.spent.wall.values()) == pytest.approx(history.until - history.began, abs=1e-6)


def test_reading_in_parts_is_reading_at_once():
    lines = storm(worlds=30, workers=10)
    history = Facts()
    for each in lines:
        history.read([each])
        history.result(STARTED + 1e6)
    assert history.result() == read(lines)


@pytest.mark.slow
def test_a_long_journal_takes_little_memory():
    def endless():
        for version in range(1, 4101):
            yield formed(10 * version, version, range(version % 50), version)
            yield from launched(version, 10 * version)
            yield line(
                10 * version + 3, "worker_left", worker=version, cause=f"cause {version}", reason="x" * 50, code=1
            )
            yield pause(10 * version + 4, version, "grow", 0.1)
            yield steps(10 * version + 5, version, 1, world=version)
            yield line(10 * version + 6, f"of_tomorrow_{version}")
            yield line(10 * version + 6, "warning", message="x" * 100)

    tracemalloc.start()
    history = read(endless())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40e6
    assert history.counts["world_formed"] == history.counts["pauses"] == 4100
    assert len(history.points) <= 2 * MOST_POINTS
    assert len(history.causes) <= 51
    assert any("are not shown" in remark for remark in history.remarks)
    assert sum(history.spent.wall.values()) == pytest.approx(history.until - history.began)


# ---- the pieces ----


def test_of_too_many_the_foremost_stay_in_order_with_the_last():
    kept = CappedList(3, lambda item: item)
    for item in (5, 1, 9, 2, 8, 3, 7, 0):
        kept.add(item)
    assert list(kept) == [9, 8, 7, 0]
    assert (kept.count, kept.dropped) == (8, 4)


def test_of_too_many_equals_some_of_all_times_stay():
    kept = CappedList(50)
    for item in range(10_000):
        kept.add(item)
    assert len(list(kept)) <= 100
    assert next(iter(kept)) == 0
    assert kept.last == 9999
    assert sum(item < 5000 for item in kept) > 0


def test_a_curve_has_one_resolution_and_loses_no_sample():
    curve = Curve()
    for step in range(20_000):
        loss = None if step == 7 else float(step)
        curve.add(Point(step, 1, 1, 2, loss, 0.1, 0.5, 0, 0.0, 0.0, time=float(step), workers=3))
    points = curve.result()
    assert len(points) < 2 * MOST_POINTS
    assert sum(point.samples for point in points) == 40_000
    assert sum(point.seconds for point in points) == 10_000
    assert {point.steps for point in points[:-1]} == {8}
    assert points[1].loss == pytest.approx(sum(range(8, 16)) / 8)


def test_a_timeline_is_bounded_whatever_changes():
    time = Timeline(0.0, TimeUse.PRODUCTIVE)
    for second in range(5 * MOST_SEGMENTS):
        time.advance(float(second))
        time.change(crew=Crew(second % 7))
        time.relabel(TimeUse.GROW, second - 0.5, second - 0.25)
    assert len(time._segments) <= MOST_SEGMENTS
    assert sum(time.spent(0).wall.values()) == 5 * MOST_SEGMENTS - 1


def test_lanes_are_bounded():
    lanes = Lanes()
    for moment in range(3 * MOST_SPANS):
        lanes.become(1, WorkerPhase.TRAINING if moment % 2 else WorkerPhase.WARM, float(moment))
    (lane,) = lanes.result()
    assert len(lane.spans) <= MOST_SPANS
    assert lane.spans[0].since == 0
    for worker in range(MOST_LANES + 10):
        lanes.left(worker + 2, 1.0, "", "", None)
    assert (len(lanes.result()), lanes.forgotten) == (MOST_LANES + 1, 10)
