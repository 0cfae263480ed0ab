"""For the unit tests: PyTorch computes in one thread, as several wait for each other by spinning, and the machine is shared."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    if "torch" in sys.modules:  # whatever needs it has imported it by now
        sys.modules["torch"].set_num_threads(1)
