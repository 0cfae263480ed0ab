"""SIGTERM takes a worker out of its job; a handler of the script's own is called, too, and may end its loop."""

import os
import signal

import pytest
from loop_benches import BATCHES, run
from session_kit import FakeMaster

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.training.job import Sigterm


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_scripts_handler_is_called_too_whenever_it_was_set():
    session, called = FakeMaster().session, []
    sigterm = Sigterm(session)
    signal.signal(signal.SIGTERM, lambda *_: called.append("before"))
    for _ in range(2):
        sigterm.listen()
    terminate()
    assert (called, sigterm.came) == (["before"], True)
    assert session.core.stopping is not None

    ours = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *given: (called.append("after"), ours(*given)))  # it respects what it finds
    sigterm.listen()
    terminate()
    assert called == ["before", "after"]


def test_a_handler_that_ends_the_process_does_not_end_it_in_the_middle_of_a_step():
    def end(*_):
        raise SystemExit(0)

    session = FakeMaster().session
    signal.signal(signal.SIGTERM, end)
    with Sigterm(session).listening():
        terminate()
    assert session.core.stopping is not None
    assert signal.getsignal(signal.SIGTERM) is end


@pytest.mark.parametrize(
    ("where", "leaves"), [((4, "within"), True), ((BATCHES - 1, "within"), True), ((BATCHES - 1, "behind"), False)]
)
def test_a_script_that_ends_when_it_was_told_to_leave_leaves_and_the_others_go_on(where, leaves):
    """Behind the last step it ends with the job: its script has a last evaluation to make, and nobody should run that again."""

    def loop(script):
        def told(*here):
            if script.worker == 1 and here == where:
                context = script.job.contexts[1]
                context.session.core.linger_seconds = 60.0  # so far it waits for another to take its state
                context.sigterm.came = True
                context.session.post(p.Terminated("told to leave (SIGTERM)"))

        for number, (x, y) in enumerate(script.loader):
            script.loss(x, y).backward()
            told(number, "within")
            script.step()
            told(number, "behind")
            if script.job and script.job.contexts[1].sigterm.came and script.worker == 1:
                break

    left, said = run(loop)
    assert said == (None, None)
    assert left[0].made == BATCHES
    assert [*left[0].job.boards] == ([1, 2] if leaves else [1]), "worlds"
