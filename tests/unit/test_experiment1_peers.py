"""The disturbance that experiment 1's peers go through, what is counted of it, and the model that they all train."""

from __future__ import annotations

import signal
import time
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import experiment1_peers
from benchmarks.experiments.zoo.pace import VARIABLE
from benchmarks.models import RESNET20, worker_batch
from benchmarks.peers.run import (
    JITTER,
    JOIN,
    KILL,
    LEAVE,
    SIGNALS,
    Course,
    Happened,
    PeerChange,
    PeerRun,
    mean_workers,
    rate,
    schedule,
    summary,
    useful_steps,
)
from benchmarks.processes import Processes
from benchmarks.steps import Gap, Step
from benchmarks.torch_models import make_dataset, make_model


def happened(at, event, after, *pauses, waited=0.0, redone=0, restarted=0):
    before = after + (1 if event in SIGNALS else -1)
    gap = Gap(pauses, ordinary=1.0, redone=redone, lost=0, from_event=2.0)
    return Happened(at, waited, PeerChange(event, before, after, gap, restarted))


def steps(*made):
    """Of (time, number, size); one line each, as if one rank wrote all of it."""
    return [Step(time, number, str(size), size) for time, number, size in made]


# ---- the schedule ----


@given(st.integers(1, 5), st.floats(1, 100), st.integers(0, 99))
def test_each_cycle_loses_two_workers_and_gets_them_back_at_moments_that_the_seed_decides(cycles, period, seed):
    plan = schedule(cycles, period, seed)
    assert [planned.event for planned in plan] == [LEAVE, JOIN, KILL, JOIN] * cycles
    for number, moment in enumerate(accumulate(planned.after for planned in plan), start=1):
        assert number * period * 0.999 <= moment <= (number + JITTER) * period * 1.001
    assert plan == schedule(cycles, period, seed) != schedule(cycles, period, seed + 1)


# ---- what is counted ----


def test_a_rate_is_of_the_steps_between_the_first_and_the_last():
    assert rate(steps((10, 1, 4), (11, 2, 4), (13, 3, 2)), batch=9) == 9 * 6 / 3
    with pytest.raises(ValueError, match="two steps"):
        rate(steps((10, 1, 4)), batch=9)


def test_a_step_counts_once_as_it_was_made_last_whoever_wrote_it_down():
    made = steps((1, 1, 4), (1.1, 1, 4), (2, 2, 4), (3, 3, 4), (5, 2, 3), (6, 3, 3), (7, 4, 3))
    assert useful_steps(made, until=3) == 12
    assert useful_steps(made, until=5) == 11, "the second was made again by three"
    assert useful_steps(made[::-1], until=10) == 4 + 3 + 3 + 3


def test_a_worker_is_there_from_when_it_is_brought_until_it_is_taken():
    events = [happened(20, LEAVE, 3), happened(30, JOIN, 4), happened(40, KILL, 3)]
    assert mean_workers(Course(4, 9, 36.0, 10, 50, events, [], 0)) == (10 * 4 + 10 * 3 + 10 * 4 + 10 * 3) / 40


def test_the_numbers_of_a_system_by_hand():
    events = [
        happened(2, LEAVE, 1, 0.5, waited=0.1, redone=2),
        happened(4, JOIN, 2, 0.25, restarted=1),
        happened(6, KILL, 1, 3.0),
        happened(8, JOIN, 2, 0.75),
    ]
    made = steps((0.5, 1, 2), (1.5, 2, 2), (3.5, 3, 1), (5, 4, 2), (7, 5, 1), (9.5, 6, 2), (10.5, 7, 2))
    numbers = summary(Course(2, 10, 20.0, 1, 10, events, made, 1))
    assert (numbers["events"], numbers["late"], numbers["redone"], numbers["restarted"]) == (4, 1, 2, 1)
    assert numbers["failures"] == 1
    pauses = {event: (some.n, some.median, some.maximum) for event, some in numbers["pauses"].items()}
    assert pauses == {LEAVE: (1, 0.5, 0.5), JOIN: (2, 0.5, 0.75), KILL: (1, 3.0, 3.0)}
    assert numbers["disturbed"] == pytest.approx(10 * (2 + 1 + 2 + 1 + 2) / 9), "steps 2 to 6"
    assert numbers["mean_workers"] == pytest.approx((1 * 2 + 2 * 1 + 2 * 2 + 2 * 1 + 2 * 2) / 9)
    assert numbers["share"] == pytest.approx(80 / (20 / 2 * 14))
    shown = dict(zip(experiment1_peers.COLUMNS, experiment1_peers.row("it", numbers), strict=True))
    assert (shown["join, s"], shown["late"], shown["share"]) == ("0.50 (0.75)", "1 of 4", "57 %")


def test_a_system_that_fails_at_once_still_has_numbers():
    numbers = summary(Course(2, 10, 20.0, 1, 5, [], [], 1))
    assert (numbers["events"], numbers["disturbed"], numbers["share"]) == (0, 0, 0)
    assert experiment1_peers.row("it", numbers)[1:4] == ["-", "-", "-"]


def test_whatever_never_pauses_has_all_of_its_share():
    ticks = range(1, 41)
    events = [happened(10, LEAVE, 3, 0.0), happened(20, JOIN, 4, 0.0), happened(30, KILL, 3, 0.0)]
    sizes = {tick: 3 if 10 < tick <= 20 or tick > 30 else 4 for tick in ticks}
    course = Course(4, 9, 36.0, 0, 40, events, steps(*((tick, tick, sizes[tick]) for tick in ticks)), 0)
    assert summary(course)["share"] == pytest.approx(1)


# ---- pauses, from step logs ----


class Scripted:
    """A peer whose workers are step logs: those that go on after an event, and when (seconds since) and with how many."""

    def __init__(self, folder, workers, after):
        self._folder, self._workers, self._after = folder, workers, after

    def write(self, lines, since):
        for pid, offset, number, size in lines:
            with (self._folder / f"steps-{pid}.log").open("a") as log:
                log.write(f"{since + offset} {number} {size} {size}\n")

    def start(self, model, workers, processes):
        self.write(
            ((pid, ago - 3, ago, self._workers) for pid in range(self._workers) for ago in range(3)),
            time.monotonic() + 9,
        )

    def remove(self, number, pids):
        self.write(self._after, time.monotonic() + 9)
        return max(pids)

    def add(self):
        self.write(self._after, time.monotonic() + 9)


def peer_run(folder, workers, *after):
    run = PeerRun(Scripted(folder, workers, after), Processes(folder))
    run.start("1m", workers)
    run.settle(1)
    return run


def test_a_survivor_that_goes_on_before_the_others_pauses_for_less(tmp_path):
    """A step of two alone, and then all three."""
    after = [(0, 3, 3, 2), (1, 3, 3, 2), (0, 5, 4, 3), (1, 5, 4, 3), (2, 5, 4, 3)]
    change = peer_run(tmp_path, 4, *after).lose("kill", signal.SIGKILL)
    assert sorted(change.gap.pauses) == pytest.approx([3, 3, 5], abs=0.5)
    assert (change.before, change.after, change.restarted, change.gap.redone, change.gap.lost) == (4, 3, 0, 0, 0)


def test_survivors_in_new_processes_pause_once_and_count_as_restarted(tmp_path):
    change = peer_run(tmp_path, 2, (7, 6, 1, 3), (8, 6, 1, 3), (9, 6, 1, 3)).gain("join")
    assert change.gap.pauses == pytest.approx((6,), abs=0.5)
    assert (change.restarted, change.gap.redone) == (2, 2)


# ---- the command line ----


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--systems", "elasticdl,ray"], "--systems ray: not one of elasticdl, torchrun, horovodrun, torchft"),
        (["--workers", "1"], "--workers 1"),
        (["--cycles", "0"], "--cycles 0"),
        (["--period", "0"], "--period"),
        (["--out", "/proc/nowhere"], "--out /proc/nowhere"),
    ],
)
def test_what_is_wrong_with_the_options_is_one_line_and_2_before_anything_starts(options, complaint, capsys):
    with pytest.raises(SystemExit) as ended:
        experiment1_peers.main(options)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert complaint in error
    assert error.count("\n") == 1


# ---- the model ----


def test_resnet20_is_a_model_like_the_others_at_the_pace_of_a_gpu(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0.02")
    slept = []
    monkeypatch.setattr("benchmarks.experiments.zoo.pace.time.sleep", slept.append)
    monkeypatch.setattr("benchmarks.experiments.zoo.pace.time.monotonic", lambda: 0.0)
    model = make_model(RESNET20)
    images, labels = make_dataset(RESNET20, worker_batch(RESNET20)).tensors
    for _ in range(2):  # the first step as well, and one whose gradients were removed
        model.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
    assert slept == pytest.approx([9 * 0.02] * 2)


def test_a_model_always_has_the_same_weights():
    for name in ("1m", RESNET20):
        first, second = (list(make_model(name).parameters()) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
