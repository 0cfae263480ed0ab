"""What a worker's steps go into, as it measures them."""

import statistics
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.elastic.core.reporting import WINDOW, Activity, StepClock
from elasticdl.elastic.torch_kit.tensors import PassTimer

PHASES = (Activity.DATA, Activity.COMPUTE, Activity.WAIT, Activity.UPDATE)
spans = st.lists(st.tuples(st.sampled_from([*PHASES, Activity.ALIVE]), st.floats(0, 100)), max_size=8)
step = st.tuples(spans, st.none() | st.floats(0, 1000), st.floats(0, 50), st.booleans())


@given(st.lists(step, min_size=1, max_size=8))
def test_each_moment_of_a_step_counts_as_what_was_done_and_the_median_of_the_last_steps_is_told(steps):
    """What a device was still at is not waiting. Between two steps an evaluation may lie, or the world is another."""
    clock, made, now = StepClock(), [], 0.0
    clock.resume(now)
    for spans, device, between, moves in steps:
        spent, doing = dict.fromkeys(PHASES, 0.0), Activity.UPDATE
        for activity, seconds in spans:
            clock.turn_to(activity, now)
            doing = doing if activity is Activity.ALIVE else activity  # to be alive changes no activity
            spent[doing] += seconds
            now += seconds
        if device is not None:
            clock.turn_to(Activity.UPDATE, now)
            clock.passes_ended(device)
            hidden = max(0.0, device - spent[Activity.DATA] - spent[Activity.COMPUTE])
            spent[Activity.COMPUTE] += min(hidden, spent[Activity.WAIT])
            spent[Activity.WAIT] -= min(hidden, spent[Activity.WAIT])
        clock.samples = len(spans)
        clock.step_made(now)
        made.append((*spent.values(), len(spans)))
        last = made[-WINDOW:]
        told = clock.last_steps()
        assert told.steps == len(last)
        medians = [statistics.median(each) for each in zip(*last, strict=True)]
        assert [told.data, told.compute, told.wait, told.update, told.samples] == pytest.approx(medians)
        if moves:
            clock.forget()
            made.clear()
            assert clock.last_steps() is None
        clock.turn_to(Activity.WAIT, now)
        now += between
        clock.resume(now)


def test_a_device_is_asked_for_its_times_and_never_waited_for(monkeypatch):
    begin, end = mock.Mock(), mock.Mock()
    begin.elapsed_time.return_value, end.query.return_value = 750.0, False
    stream = mock.Mock(**{"record_event.side_effect": [begin, end, mock.Mock()]})
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: enable_timing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    timer = PassTimer(torch.device("cuda", 0))
    assert timer.seconds == 0.0
    timer.begin()
    timer.end()
    assert timer.seconds == 0.0  # it is not through yet
    end.query.return_value = True
    assert timer.seconds == 0.75
    begin.elapsed_time.assert_called_once_with(end)
    timer.begin()
    assert timer.seconds == 0.0
