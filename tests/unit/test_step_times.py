"""What a worker's steps go into, as it measures them."""

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.elastic.core.reporting import WINDOW, Activity, StepClock
from elasticdl.elastic.torch_kit.tensors import PassTimer
from elasticdl.job.messages import StepTimes

PHASES = (Activity.DATA, Activity.COMPUTE, Activity.WAIT, Activity.UPDATE)


def run_step(clock, start, spans):
    """Activities one after the other, each so many seconds; returns when the step was made."""
    now = start
    for activity, seconds in spans:
        clock.turn_to(activity, now)
        now += seconds
    clock.step_made(now)
    return now


def test_a_step_is_divided_by_what_was_done():
    clock = StepClock()
    clock.resume(0.0)
    clock.samples = 12
    spans = [(Activity.UPDATE, 0.5), (Activity.DATA, 1.0), (Activity.COMPUTE, 1.0)]
    spans += [(Activity.ALIVE, 1.0), (Activity.DATA, 1.0)]  # to be alive changes no activity
    run_step(clock, 0.0, [*spans, (Activity.COMPUTE, 2.0), (Activity.WAIT, 3.0), (Activity.UPDATE, 0.25)])
    assert clock.last_steps() == StepTimes(1, data=2.0, compute=4.0, wait=3.0, update=0.75, samples=12.0)


def test_the_median_of_the_last_steps_counts():
    clock = StepClock()
    now = 0.0
    clock.resume(now)
    for number in range(2 * WINDOW):
        slow = 50.0 if number in (WINDOW + 3, WINDOW + 9) else 1.0
        now = run_step(clock, now, [(Activity.DATA, slow)])
    assert clock.last_steps() == StepTimes(WINDOW, 1.0, 0.0, 0.0, 0.0, 0.0)


def test_what_is_not_part_of_a_step_does_not_count():
    clock = StepClock()
    clock.resume(0.0)
    run_step(clock, 0.0, [(Activity.COMPUTE, 1.0)])
    clock.turn_to(Activity.WAIT, 1.0)  # an evaluation
    clock.resume(100.0)
    run_step(clock, 100.0, [(Activity.COMPUTE, 1.0)])
    assert clock.last_steps() == StepTimes(2, 0.0, 1.0, 0.0, 0.0, 0.0)
    clock.forget()
    clock.turn_to(Activity.WAIT, 200.0)
    assert clock.last_steps() is None


def test_what_a_device_was_still_at_is_not_waiting():
    clock = StepClock()
    clock.resume(0.0)
    for activity, now in ((Activity.DATA, 0.0), (Activity.COMPUTE, 1.0), (Activity.WAIT, 1.5), (Activity.UPDATE, 6.0)):
        clock.turn_to(activity, now)
    clock.passes_ended(device_seconds=4.0)  # the host was through with handing them over after 1.5
    clock.step_made(6.0)
    assert clock.last_steps() == StepTimes(1, data=1.0, compute=3.0, wait=2.0, update=0.0, samples=0.0)


@given(
    spans=st.lists(st.tuples(st.sampled_from([*PHASES, Activity.ALIVE]), st.floats(0, 100)), max_size=20),
    device=st.floats(0, 1000),
)
def test_nothing_of_a_step_is_lost(spans, device):
    clock = StepClock()
    clock.resume(0.0)
    now = 0.0
    for activity, seconds in spans:
        clock.turn_to(activity, now)
        now += seconds
    clock.turn_to(Activity.UPDATE, now)
    clock.passes_ended(device)
    clock.step_made(now)
    times = clock.last_steps()
    assert times.busy + times.wait == pytest.approx(now)
    assert min(times.data, times.compute, times.wait, times.update) >= -1e-9


def test_a_device_is_asked_for_its_times_and_never_waited_for(monkeypatch):
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.reached = False

        def query(self):
            return self.reached

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    def record_event(event):
        event.at = clock[0]
        return event

    stream = types.SimpleNamespace(record_event=record_event)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    timer = PassTimer(torch.device("cuda", 0))
    assert timer.seconds == 0.0
    timer.begin()
    clock[0] = 0.75
    timer.end()
    assert timer.seconds == 0.0  # it is not through yet
    timer._end.reached = True
    assert timer.seconds == 0.75
    timer.begin()
    assert timer.seconds == 0.0
