"""Which signals are wishes of their own."""

import signal

import pytest

from elasticdl.cli.signals import ECHO_SECONDS, Interrupted, SignalLog

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("signals", "wishes"),
    [
        ([HUP, HUP], 1),  # the kernel's and the shell's, as a terminal closes
        ([TERM, TERM, HUP], 1),  # a service manager's
        ([INT, INT], 2),  # a person's
        ([TERM, INT], 2),
    ],
)
def test_what_comes_twice_at_once_is_one_wish_but_for_ctrl_c(signals, wishes):
    log = SignalLog(clock=lambda: 7.0)
    for number in signals:
        log.add(number)
    assert [log.take() for _ in range(4)].count(True) == wishes
    assert log.first == signals[0]


def test_what_comes_again_later_is_another_wish():
    now = [7.0]
    log = SignalLog(clock=lambda: now[0])
    log.add_or_raise(HUP)
    log.add_or_raise(HUP)
    now[0] += ECHO_SECONDS
    with pytest.raises(Interrupted):
        log.add_or_raise(HUP)
