"""When another master is of no use any more: what earlier ones have left decides."""

from datetime import UTC, datetime, timedelta

import pytest
from kubernetes_kit import terminated

from elasticdl.places.pods.judge import MOST_CRASHES, SOON_SECONDS, crash_loop

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def master(number, code=1, seconds=3.0, *, job="job", **more):
    """The pod of the master that was started as the so-manieth."""
    state = terminated(code, message="Traceback\nRuntimeError: out of luck", **more)
    started = BEGIN + timedelta(hours=number)
    times = {"startedAt": started, "finishedAt": started + timedelta(seconds=seconds)}
    state["terminated"].update({key: f"{time:%Y-%m-%dT%H:%M:%SZ}" for key, time in times.items()})
    return {
        "metadata": {"name": f"m-{number}", "namespace": "lab", "ownerReferences": [{"uid": job}]},
        "spec": {"containers": [{"name": "elasticdl"}], "nodeName": "n"},
        "status": {"phase": "Failed", "containerStatuses": [{"name": "elasticdl", "state": state}]},
    }


def masters(count=MOST_CRASHES, **more):
    return [master(number, **more) for number in range(count)]


def test_masters_that_crash_again_and_again_are_enough():
    assert crash_loop(reversed(masters()), "job") == (
        f"its master crashed {MOST_CRASHES} times in a row: RuntimeError: out of luck, exit code 1; "
        f"its log: kubectl logs -n lab m-{MOST_CRASHES - 1}"
    )
    assert crash_loop(masters(reason="OOMKilled", code=137), "job")


LOST = {"metadata": {"name": "lost", "ownerReferences": [{"uid": "job"}]}, "spec": {}, "status": {"phase": "Failed"}}
AT_WORK = {"phase": "Running", "containerStatuses": [{"name": "elasticdl", "state": {"running": {}}}]}
RUNNING = {**LOST, "status": AT_WORK}


@pytest.mark.parametrize(
    "seen",
    [
        [],
        masters(MOST_CRASHES - 1),
        masters(100, code=143),  # told to leave
        masters(100, code=137),  # killed
        masters(100, seconds=SOON_SECONDS),
        masters(100, job="one of the same name, before"),
        [*masters(MOST_CRASHES - 1), master(50, seconds=86400), *masters(0)],
        [*masters(), master(50, code=143)],
        [LOST] * 100,
        [RUNNING],
    ],
    ids=["none", "few", "left", "killed", "late", "another job", "one at work", "one that left", "lost", "running"],
)
def test_anything_else_has_another_master_started(seen):
    assert crash_loop(seen, "job") == ""
