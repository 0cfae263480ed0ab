"""For the unit tests: PyTorch computes in one thread, as several wait for each other by spinning, and the machine is shared."""

import signal
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    if "torch" in sys.modules:  # whatever needs it has imported it by now
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """A worker that takes part listens for it until its process ends: the next test has another worker, or none."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test of another ring may have left one
    yield
    if before is not None:  # it is Python's
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run_trainers(tmp_path, monkeypatch):
    """``run_trainers(kind, workers, ...)``: as `trainer_benches.run_trainers`, which takes seconds to import."""
    from trainer_benches import run_trainers

    return lambda kind, *given, **options: run_trainers(kind, tmp_path, monkeypatch, *given, **options)
