"""Processes that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from warm_python import WarmPython


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Runs scripts with the modules imported that the test file names in ``WARM``, and with its ``WARM_ENV``."""
    env = getattr(request.module, "WARM_ENV", {})
    python = WarmPython(request.module.WARM, tmp_path_factory.mktemp("alone"), env)
    yield python
    python.close()
