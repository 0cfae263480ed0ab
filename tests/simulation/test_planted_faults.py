"""The simulator can fail: it finds each fault that is planted in the cores."""

from __future__ import annotations

import pytest

from tests.simulation.planted import PLANTED, SLOW, PlantedFault, find

FAULTS = [pytest.param(each, marks=[pytest.mark.slow] * (each.name in SLOW)) for each in PLANTED]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_planted_fault_is_found(fault: PlantedFault) -> None:
    assert find(fault, fault.seeds), f"histories of {fault.seeds} do not show that {fault.name}"
