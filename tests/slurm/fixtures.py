"""Fixtures that give tests a Slurm. A test module has them with `pytest_plugins = ["tests.slurm.fixtures"]`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.cluster.recipes import Unavailable
from tests.slurm.lab import SlurmLab, slurm_lab

PROCESSORS = 4


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """Of one node with `PROCESSORS` processors."""
    with ExitStack() as stack:
        try:
            lab = stack.enter_context(slurm_lab(tmp_path_factory.mktemp("slurm"), PROCESSORS))
        except Unavailable as error:
            pytest.skip(f"no Slurm: {error}")
        yield lab
