"""For all rings: what a test starts must be interruptible, however the tests themselves were started."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """A shell that puts the tests into the background has them ignore SIGINT, and `nohup` SIGHUP; children inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
