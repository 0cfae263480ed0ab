"""For all rings: what runs together, and that what a test starts can be interrupted."""

import signal

import pytest

CLUSTERS = ("full_cluster", "cluster")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes a file stays in one of them, and so do all tests that share a cluster."""
    for item in items:
        shared = [name for name in CLUSTERS if name in getattr(item, "fixturenames", ())]
        item.add_marker(pytest.mark.xdist_group(shared[0] if shared else item.path.name))


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A shell that puts the tests into the background has them ignore SIGINT, and `nohup` SIGHUP; children inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
