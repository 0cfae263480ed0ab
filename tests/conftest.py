"""For all rings: what a test starts must be interruptible, however the tests themselves were started."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """A shell that puts the tests into the background has them ignore SIGINT, which their children would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
