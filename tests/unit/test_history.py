"""A job's history: what is computed from its journal, whatever is in it."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections import Counter
from copy import deepcopy

import pytest
from history_kit import STARTED, formed, launched, line, pause, steps
from hypothesis import example, given
from hypothesis import strategies as st

from elasticdl.job.facts import MOST_POINTS, MOST_SHOWN, Curve, Facts, Point, TimeUse, WorkerPhase
from elasticdl.job.journal import KINDS, Fields, SpeedupRow
from elasticdl.report.page import page_data


def read(lines, until=0.0):
    return Facts().read(lines).conclude(until)


def spent(history):
    return {str(doing): round(seconds, 6) for doing, seconds in history.spent.wall.items() if seconds}


# ---- jobs whose time is known ----


class Life:
    """A job that is lived through: it writes its journal, and counts as it goes where its time went.

    Of an action ``seconds`` says how long it lasts, ``some`` (0 to 3) what else there is to choose.
    """

    def __init__(self, workers):
        self.now, self.lines = 0.0, []
        self.wall, self.paid, self.changes, self.causes = Counter(), Counter(), Counter(), Counter()
        self.worlds, self.pauses = [], []  # members; kind, survivors, and seconds
        self.lanes = {}  # what each worker became, and when
        self.step = self.made = self.lost = self.next_id = 0
        self.late = False
        self.begin(workers)

    def begin(self, workers):
        self.tell("job_started", job="j", workers="1-4")
        self.world, self.members = 0, []
        came = self.launch(workers)
        self.spend("starting", 4)
        self.form(came, 4, 4)
        self.spend("starting", 1)
        self.first_step()
        self.changes["starting"] += 1

    def tell(self, event, **fields):
        self.lines.append(line(self.now, event, **fields))

    def spend(self, use, seconds):
        self.now += seconds
        self.wall[use] += seconds
        self.paid[use] += seconds * len(self.members)

    def launch(self, number):
        came = [*range(self.next_id, self.next_id + number)]
        self.next_id += number
        for worker in came:
            self.lines += [line(self.now, f"worker_{event}", worker=worker) for event in ("launched", "started")]
            self.lanes[worker] = [("pending", self.now), ("starting", self.now)]
        return came

    def form(self, came, seconds, told):
        """They have been starting for half of this time, and were ready for the other."""
        for worker in came:
            self.lines.append(line(self.now - seconds / 2, "worker_ready", worker=worker))
            self.lanes[worker] += [("warm", self.now - seconds / 2), ("training", self.now)]
        self.paid["starting"] += len(came) * seconds / 2
        self.paid["waiting"] += len(came) * seconds / 2
        self.world, self.members = self.world + 1, [*self.members, *came]
        self.worlds.append(tuple(self.members))
        self.lines.append(formed(self.now, self.world, self.members, self.step, seconds=told))

    def first_step(self, after=0):
        """It is told so many seconds later, with what was trained since."""
        self.spend("productive", after)
        self.step, self.made, self.lost = self.step + 1, self.made + 1, max(0, self.lost - 1)
        self.lines.append(steps(self.now, self.step, 1, world=self.world, seconds=after))

    def train(self, seconds, some, told=True):
        again = min(self.lost, 10)
        slow = some * seconds / 100 * (10 - again) / 10  # so much of its time each new step waits for the slowest
        self.wall["again"] += again * seconds / 10
        self.wall["slow"] += slow
        self.wall["productive"] -= again * seconds / 10 + slow
        self.spend("productive", seconds)
        self.step, self.made, self.lost = self.step + 10, self.made + 10, self.lost - again
        slowest = some * seconds / 1000
        words = steps(self.now, self.step, 10, world=self.world, seconds=seconds, again=again, slowest=slowest)
        return [words] if not told else self.lines.append(words)

    def evaluate(self, seconds, some):
        self.spend("evaluation", seconds)
        self.tell("evaluation", step=self.step, seconds=seconds, metrics={"accuracy": 0.5, "odd": None})

    def save(self, seconds, some):
        self.spend("checkpoint", seconds)
        self.tell("checkpoint", step=self.step, path="x", seconds=seconds + 9, held=seconds)

    def grow(self, seconds, some):
        self.change("grow", seconds, some, self.launch(1 + some))

    def shrink(self, seconds, some):
        if len(self.members) > 1:
            self.leave(self.members[:1], ("drained", "clean", "finished", "drained")[some])
            self.change("shrink", seconds, some, [])

    def lose_newcomer(self, seconds, some):
        self.leave(self.launch(1), "killed")

    def fail(self, seconds, some):
        """One is killed, or all; and what was told of steps before may come late."""
        late = self.train(seconds, 0, told=False) if some % 2 else []
        gone = self.members[:1] if some < 2 else self.members
        if len(gone) < len(self.members) or some == 2:  # else nobody is left who could say it
            self.tell("world_broken", world=self.world, reason="killed")
        self.lines += late
        self.leave(gone, "killed")
        lost = min(self.step, 7)
        self.step, self.lost = self.step - lost, self.lost + lost
        self.change("failure", seconds, some, self.launch(2 - some % 2) if some else self.launch(int(not self.members)))

    def wait(self, seconds, some):
        """One is killed, and without it there are too few."""
        self.tell("world_broken", world=self.world, reason="killed")
        self.leave(self.members[:1], "killed")
        self.tell("phase", phase="waiting", reason="too few")
        self.change("failure", seconds, some, self.launch(1 + some), meanwhile="waiting")
        self.tell("phase", phase="running", reason="")

    def stand(self, seconds, some):
        """There are too few for a while, of whom none is new afterwards."""
        self.tell("phase", phase="waiting", reason="too few")
        self.spend("waiting", seconds)
        self.tell("phase", phase="running", reason="")

    def leave(self, workers, cause):
        for worker in workers:
            self.tell("worker_left", worker=worker, cause=cause)
            self.causes[cause] += 1
        self.members = [worker for worker in self.members if worker not in workers]

    def change(self, kind, seconds, some, came, meanwhile=""):
        """Survivors tell the pause before its first step or a little after it, the longest first or last."""
        survivors = self.members
        self.spend(meanwhile or kind, seconds)
        self.form(came, seconds, seconds / 2 if survivors else seconds)
        self.spend(kind, 1)
        late, longest = some >= 2 and not meanwhile, survivors[some % len(survivors)] if survivors else None
        if late:
            self.late = True  # nobody knows which seconds were the pause's
            self.first_step(some - 2)
        for worker in survivors:
            self.spend("productive", late / 8)
            self.lines.append(pause(self.now, self.world, kind, (seconds + 1) / (1 + (worker != longest)), worker))
        if not late:
            self.first_step(some)
        self.changes[kind] += 1
        self.pauses.append((kind, len(survivors), seconds + 1))

    def another_master(self, seconds, some):
        """It is told the last steps once more."""
        self.tell("master_restarted", world=self.world, members=self.members, missing=[], seconds=seconds)
        self.lines.append(steps(self.now, self.step, 10, world=self.world, seconds=seconds, again=some))

    def go_on(self, seconds, some):
        """It is stopped, and goes on later in another job."""
        self.end(seconds, some)
        self.now += seconds
        self.begin(1 + some)

    def end(self, seconds, some):
        self.tell("phase", phase="stopping", reason="") if some % 2 else None
        for worker in self.members:
            self.lanes[worker].append(("leaving", self.now))
        self.spend("ending", seconds)
        if not some % 2:
            self.tell("steps_over", step=self.step, seconds=seconds)
            self.spend("ending", 2)
        self.tell("job_finished", phase="stopped" if some % 2 else "succeeded", steps=self.step)


ACTIONS = [
    "train",
    "train",
    "evaluate",
    "save",
    "grow",
    "shrink",
    "fail",
    "wait",
    "stand",
    "lose_newcomer",
    "another_master",
    "go_on",
]
moments = st.integers(1, 400).map(lambda number: number / 8)
acts = st.lists(st.tuples(st.sampled_from(ACTIONS), moments, st.integers(0, 3)), max_size=8)


@given(st.integers(1, 4), acts, st.none() | st.integers(0, 1))
def test_each_moment_of_a_job_counts_as_what_it_was(workers, actions, ends):
    life = Life(workers)
    for action, seconds, some in actions:
        getattr(life, action)(seconds, some)
    if ends is None:
        life.spend("productive", 9)
    else:
        life.end(9, ends)
    history = read(life.lines, STARTED + life.now)
    wanted = {str(use): pytest.approx(life.wall[use], abs=1e-4) for use in TimeUse}
    assert {str(use): seconds for use, seconds in history.spent.wall.items()} == wanted, life.lines
    paid = history.spent.workers
    of_some = {"productive", "again", "slow", *(("grow", "shrink", "failure") if life.late else ())}
    assert sum(paid[use] for use in of_some) == pytest.approx(sum(life.paid[use] for use in of_some), abs=1e-3)
    rest = [use for use in TimeUse if use not in of_some]
    assert [paid[use] for use in rest] == pytest.approx([life.paid[use] for use in rest], abs=1e-3), life.lines
    found = [(each.kind, each.workers, each.total) for each in history.pauses]
    assert found == [(kind, workers, pytest.approx(total, abs=1e-4)) for kind, workers, total in life.pauses]
    assert (history.changes, history.causes, history.counts["pauses"]) == (life.changes, life.causes, len(life.pauses))
    assert [world.members for world in history.worlds] == life.worlds
    for lane in history.lanes:
        spans = [(str(span.phase), span.since - STARTED) for span in lane.spans]
        assert spans == [(doing, pytest.approx(since, abs=1e-4)) for doing, since in life.lanes[lane.worker]]
    assert (history.steps_made, history.next_worker) == (life.made, life.next_id)
    assert any("was stopped and went on" in each for each in history.remarks()) == (life.changes["starting"] > 1)


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
    page_data(found)
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


def test_only_what_entries_may_have_is_read_of_them():
    assert set(Fields.model_fields) - {"time", "event"} <= {name for kind in KINDS.values() for name in kind.fields}


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
    assert len(history.lanes) <= MOST_SHOWN + 50
    assert any("only the newest" in remark for remark in history.remarks())
    assert sum(history.spent.wall.values()) == pytest.approx(history.until - history.began)


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
        (
            [steps(80, 10, 9, seconds=75), broken(80.05), formed(82, 2, [0], 10, seconds=1.95), pause(93, 2, "failure", 3),
             steps(93, 11, 1, world=2, seconds=10)],
            100, {"productive": 92, "failure": 3},
        ),
        ([broken(60), formed(62, 2, [2], 1)], 90, {"productive": 55, "failure": 30}),
        # A world that a new master finds has trained meanwhile.
        (
            [steps(20, 90, 89), line(30, "master_restarted", world=2, members=[0, 1, 2], missing=[], seconds=8),
             steps(31, 200, 110, world=2)],
            40, {"productive": 35},
        ),
        # Nothing takes more than was trained by then; the checkpoint of a stop is part of the end.
        ([line(8, "evaluation", step=9, seconds=1e9)], 10, {"evaluation": 3, "productive": 2}),
        (
            [TRAINED, phase(10, "stopping"), line(14, "checkpoint", step=50, held=4.5), finished(15, "stopped")],
            0, {"productive": 4.5, "checkpoint": 0.5, "ending": 5},
        ),
        # After the last step of one, others may have work left, for which the job waits, or recovers.
        ([TRAINED, phase(12, "waiting"), OVER], 20, {"productive": 5, "waiting": 8, "ending": 2}),
        (
            [TRAINED, broken(12), OVER, formed(20, 2, [0], 50), steps(21, 60, 10, world=2, seconds=1)],
            21, {"productive": 5 + 1, "failure": 5, "ending": 5},
        ),
    ],
    ids=["slow steps", "not yet again", "a new master", "evaluates for ever", "stopped", "waits at the end", "breaks at the end"],
)  # fmt: skip
def test_where_the_time_went(lines, until, wanted):
    history = read([*START, *lines], until and STARTED + until)
    assert spent(history) == pytest.approx({"starting": 5, **wanted})


def test_what_is_before_the_first_step_is_the_start():
    assert spent(read(BEGUN, STARTED + 50)) == {"starting": 50}
    never = [*BEGUN, broken(60), phase(61, "stopping"), finished(62, "failed")]
    assert spent(read(never)) == {"starting": 61, "ending": 1}


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


def test_what_sums_gradients_is_known_from_the_end_too():
    end = line(20, "job_finished", phase="succeeded", steps=9, collective="horovod", compared=8, compared_workers=2)
    found = read([*START, TRAINED, end][9:])
    assert (found.collective, found.compared) == ("horovod", (8, 2))
    began = line(6, "collective", worker=0, engine="torch")
    assert read([*START, began, TRAINED, finished(20)]).collective == "torch"  # as the end of an older version


def test_a_worker_that_has_made_its_last_step_and_trains_again_after_all_is_training():
    lanes = read([*START, TRAINED, OVER, broken(16), formed(17, 2, (0, 1), 50)]).lanes
    found = [[(str(each.phase), round(each.since - STARTED)) for each in lane.spans[3:]] for lane in lanes]
    assert found == [[("training", 4), ("leaving", 10), ("training", 17)]] * 2


def test_a_lane_tells_what_a_worker_was_and_how_it_ended():
    gone = line(14, "worker_left", worker=1, cause="drained", reason="was told to", code=0)
    draining = line(12, "worker_draining", worker=1, reason="the limit is lower")
    history = read([*START, draining, formed(13, 2, [0], 100), gone])
    first, second = history.lanes
    assert [(str(span.phase), round(span.since - STARTED, 1)) for span in second.spans] == [
        ("pending", 0), ("starting", 0.1), ("warm", 2), ("training", 4), ("leaving", 12),
    ]  # fmt: skip
    assert second.spans[-1].until == STARTED + 14
    assert (second.cause, second.host, second.code, first.cause) == ("drained", "node-1", 0, "")
    worlds = [(world.version, len(world.members), world.until) for world in history.worlds]
    assert worlds == [(1, 2, STARTED + 13), (2, 1, None)]


def test_advice_and_trouble_are_kept_as_they_come():
    lines = [*START, line(6, "advice", text="4 would do", curve=[{"workers": 2, "speedup": 1.8, "measured": True}, [1], {"workers": 3}]),
             line(7, "worker_stuck", worker=0, host="h", seconds=31, where="train.py:31 in load", stack=["a"]),
             line(8, "worker_recovered", worker=0), line(9, "decision", workers=2, reason="enough")]  # fmt: skip
    history = read(lines)
    assert (history.advice, history.speedup) == ("4 would do", [SpeedupRow(workers=2, speedup=1.8, measured=True)])
    assert (history.target, history.decision, history.wanted) == (2, "enough", "1-4")
    marks = [(mark.event, mark.text) for mark in history.marks]
    assert marks[0] == ("phase", "running")
    assert [event for event, _ in marks[1:]] == ["worker_stuck", "worker_recovered", "decision"]
