"""SIGTERM takes a worker out of its job; a handler of the script's own is called, too, and may end its loop."""

import os
import signal
from types import SimpleNamespace

import pytest
from session_kit import FakeMaster

from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import Stopped
from elasticdl.elastic.torch_kit.participant import Participant
from elasticdl.elastic.training.job import Sigterm
from elasticdl.job import messages as m


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_scripts_handler_is_called_too_whenever_it_was_set():
    session, called = FakeMaster().session, []
    sigterm = Sigterm(session)
    signal.signal(signal.SIGTERM, lambda *_: called.append("before"))
    sigterm.listen()
    sigterm.listen()
    terminate()
    assert called == ["before"]
    assert session.core.stopping is not None
    assert sigterm.came

    ours = signal.getsignal(signal.SIGTERM)

    def handle(number, frame):
        called.append("after")
        ours(number, frame)  # as a handler that respects what it finds

    signal.signal(signal.SIGTERM, handle)
    sigterm.listen()
    terminate()
    assert called == ["before", "after"]


def test_a_handler_that_ends_the_process_does_not_end_it_in_the_middle_of_a_step():
    session = FakeMaster().session

    def end(*_):
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    with Sigterm(session).listening():
        terminate()
    assert session.core.stopping is not None
    assert signal.getsignal(signal.SIGTERM) is end


@pytest.mark.parametrize(
    ("came", "stopping", "leaves"),
    [
        ("before the last step", None, True),
        ("within the last step", None, True),
        ("behind the last step", None, False),
        ("", None, False),
        ("", "drained", True),
    ],
)
def test_a_script_that_ends_when_it_was_told_to_leave_leaves_and_the_others_go_on(came, stopping, leaves):
    """Behind the last step it ends with the job: its script has a last evaluation to make, and nobody should run that again."""
    session = SimpleNamespace(posted=[])
    session.post = session.posted.append
    done = []

    def change_world(state, why):
        done.append("left")
        raise Stopped("told", checkpoint=False, drained=True)

    job = SimpleNamespace(
        session=session,
        is_told_to_leave=stopping is not None,
        under_master=True,
        sigterm=SimpleNamespace(came=came == "within the last step"),
        change_world=change_world,
        epoch_ended=lambda: None,
        end=lambda state: done.append("ended"),
    )
    participant = Participant.__new__(Participant)
    state = SimpleNamespace(progress=Progress(1, 20, 7, 140))
    host = SimpleNamespace(left=lambda: done.append("closed"), step_over=lambda: None)
    last = SimpleNamespace(batch=SimpleNamespace(is_last=came != "before the last step", epoch=1), forget=lambda: None)
    position = SimpleNamespace(answers=SimpleNamespace(close_step=lambda: None))
    vars(participant).update(job=job, state=state, is_reduced=False, _ended_epoch=-1, _host=host)
    vars(participant).update(open_batches=[last], position=position)
    participant.close()
    job.sigterm.came = bool(came)
    assert participant.end() is not leaves
    assert done == (["left", "closed"] if leaves else ["ended"])
    assert bool(session.posted) == (leaves and stopping is None)
    assert all(isinstance(event.order, m.Drain) for event in session.posted)
