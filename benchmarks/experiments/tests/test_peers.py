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
from benchmarks.experiment1_peers import (
    JITTER,
    JOIN,
    KILL,
    LEAVE,
    SIGNALS,
    Course,
    Happened,
    rate,
    schedule,
    summary,
    useful_steps,
)
from benchmarks.models import RESNET20
from benchmarks.peers.run import PeerChange, PeerRun
from benchmarks.processes import Processes
from benchmarks.steps import Gap, Step
from benchmarks.torch_models import make_model


def happened(at, event, after, *pauses, waited=0.0, redone=0, restarted=0):
    before = after + (1 if event in SIGNALS else -1)
    gap = Gap(pauses, ordinary=1.0, redone=redone, lost=0, from_event=2.0)
    return Happened(at, waited, PeerChange(event, before, after, gap, restarted))


def steps(*made):
    """Of (time, number, size); one line each, as if one rank wrote all of it."""
    return [Step(time, number, str(size), size) for time, number, size in made]


@given(st.integers(1, 5), st.floats(1, 100), st.integers(0, 99))
def test_each_cycle_loses_two_workers_and_gets_them_back_at_moments_that_the_seed_decides(cycles, period, seed):
    plan = schedule(cycles, period, seed)
    assert [planned.event for planned in plan] == [LEAVE, JOIN, KILL, JOIN] * cycles
    for number, moment in enumerate(accumulate(planned.after for planned in plan), start=1):
        assert number * period * 0.999 <= moment <= (number + JITTER) * period * 1.001
    assert plan == schedule(cycles, period, seed) != schedule(cycles, period, seed + 1)


def test_a_rate_is_of_the_steps_between_the_first_and_the_last():
    assert rate(steps((10, 1, 4), (11, 2, 4), (13, 3, 2)), batch=9) == 9 * 6 / 3
    with pytest.raises(ValueError, match="two steps"):
        rate(steps((10, 1, 4)), batch=9)


def test_a_step_counts_once_as_it_was_made_last_whoever_wrote_it_down():
    made = steps((1, 1, 4), (1.1, 1, 4), (2, 2, 4), (3, 3, 4), (5, 2, 3), (6, 3, 3), (7, 4, 3))
    assert [useful_steps(made[::-1], until) for until in (3, 5, 10)] == [12, 11, 4 + 3 + 3 + 3]


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


class Scripted:
    """A peer whose workers are step logs: those that go on after an event, and when (seconds since) and with how many."""

    def __init__(self, folder, workers, after):
        self._folder, self._workers, self._after = folder, workers, after

    def write(self, lines):
        for pid, offset, number, size in lines:
            with (self._folder / f"steps-{pid}.log").open("a") as log:
                log.write(f"{time.monotonic() + 9 + offset} {number} {size} {size}\n")

    def start(self, model, workers, processes):
        self.write((pid, ago - 3, ago, self._workers) for pid in range(self._workers) for ago in range(3))

    def remove(self, number, pids):
        self.write(self._after)
        return max(pids)

    def add(self):
        self.write(self._after)


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


@pytest.mark.parametrize("name", ["1m", RESNET20])
def test_a_model_always_has_the_same_weights(name):
    first, second = (list(make_model(name).parameters()) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
