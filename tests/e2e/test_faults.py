"""What hangs in real jobs, a smaller form of `python -m benchmarks.faults`: the right worker is named, with its line."""

import pytest

from benchmarks.faults.__main__ import BY_NAME, LIMITS, find
from benchmarks.processes import scratch

pytestmark = pytest.mark.slow
LATE_SECONDS = 5.0  # at most, beyond the limit


@pytest.mark.parametrize(
    ("name", "collective", "done"),
    [
        ("wait_for_a_lock", "torch", "replaced"),
        ("hold_pythons_lock", "auto", "replaced"),
        ("skip_a_collective", "auto", "the job ends"),
    ],
)
def test_who_hangs_is_named_with_its_line(tmp_path, name, collective, done):
    with scratch(tmp_path / "kept") as processes:
        finding = find(BY_NAME[name], LIMITS, 3, collective, processes)
    assert finding.right, finding
    assert finding.after < LIMITS[BY_NAME[name].limit] + LATE_SECONDS, finding
    assert finding.done == done


def test_status_and_events_show_where_it_stands(tmp_path):
    """As a user sees it, while the worker still hangs."""
    with scratch(tmp_path / "kept") as processes:
        finding = find(BY_NAME["hang_in_c"], {**LIMITS, "progress_timeout": 15.0}, 2, "torch", processes, look=True)
    assert "hang_in_c" in finding.shown["status"], finding.shown
    assert "worker_stuck" in finding.shown["events"]
    assert "in hang_in_c\n" in finding.shown["events"]
