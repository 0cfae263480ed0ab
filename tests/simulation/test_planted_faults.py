"""The simulator can fail: it finds each fault that is planted in the cores."""

from __future__ import annotations

import pytest

from tests.simulation.planted import PLANTED, PlantedFault, find


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name.replace(" ", "_"))
def test_a_planted_fault_is_found(fault: PlantedFault) -> None:
    assert find(fault, first=0, most=fault.seeds), f"{fault.seeds} histories do not show that {fault.name}"
