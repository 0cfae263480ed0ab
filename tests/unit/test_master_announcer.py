"""The events on a job's Job: what a person looks for, few of them, and the rest is counted."""

import asyncio
import re

import pytest

from elasticdl.kube.client import ApiError
from elasticdl.master.shell.cluster_master import (
    BURST,
    SECONDS_EACH,
    Announcer,
    make_event,
)

LEFT = {"worker": 1, "cause": "preempted", "reason": "was preempted", "code": 137}


@pytest.mark.parametrize(
    ("event", "fields", "reason", "warning"),
    [
        ("job_started", {"job": "j", "workers": "2-4"}, "JobStarted", False),
        (
            "world_formed",
            {"world": 2, "members": [2, 0], "step": 5, "reason": "worker 1 was preempted"},
            "WorldFormed",
            False,
        ),
        ("worker_left", LEFT, "WorkerPreempted", True),
        ("worker_left", {"worker": 1, "cause": "out_of_memory", "reason": "x"}, "WorkerOutOfMemory", True),
        ("worker_left", {"worker": 1, "cause": "node_lost", "reason": "x"}, "WorkerNodeLost", True),
        ("worker_pending", {"worker": 1, "reason": "0/2 nodes are available"}, "WorkerPending", False),
        ("phase", {"phase": "waiting", "reason": "1 of 2 workers"}, "WaitingForWorkers", True),
        ("master_restarted", {"world": 3, "missing": [1]}, "MasterRestarted", False),
        ("job_finished", {"phase": "failed", "reason": "x"}, "JobFailed", True),
        ("job_finished", {"phase": "succeeded", "reason": ""}, "JobSucceeded", False),
        ("worker_left", {"worker": 1, "cause": "finished", "reason": "x"}, None, False),
        ("phase", {"phase": "running", "reason": ""}, None, False),
        ("checkpoint", {"step": 1}, None, False),
        ("worker_pending", {"worker": 1, "reason": "it is being started on node n0"}, None, False),
    ],
)
def test_what_a_person_looks_for_is_an_event(event, fields, reason, warning):
    announcer = Announcer(pytest.fail, {"name": "digits-master", "namespace": "lab"})
    announcer.recorded(event, fields)
    if reason is None:
        assert announcer._due.empty()
    else:
        made = announcer._due.get_nowait()
        assert (made["reason"], made["type"], bool(made["message"])) == (
            reason,
            "Warning" if warning else "Normal",
            True,
        )


def test_events_are_few_and_the_next_says_how_many_were_left_out():
    told, now = [], [0.0]

    async def ten_minutes():
        announcer = Announcer(told.append, {"name": "digits-master", "namespace": "lab"}, lambda: now[0])
        async with announcer.announcing():
            for second in range(600):
                now[0] = float(second)
                announcer.recorded("worker_left", LEFT)
                announcer.recorded("world_formed", {"world": second, "members": [0], "reason": "", "step": 0})
            announcer.recorded("job_finished", {"phase": "failed", "reason": "no place"})

    asyncio.run(ten_minutes())
    assert len(told) <= BURST + 600 / SECONDS_EACH + 1
    left_out = [int(found[1]) for each in told if (found := re.match(r"\((\d+) events before it", each["message"]))]
    assert len(told) + sum(left_out) == 1201
    assert told[-1]["reason"] == "JobFailed"


def test_an_event_is_about_the_job_and_not_too_long():
    subject = {"apiVersion": "batch/v1", "kind": "Job", "namespace": "lab", "name": "digits-master", "uid": "u"}
    event = make_event("WorldFormed", "ä" * 2000, subject, 61.0, warning=False)
    assert event["involvedObject"] == subject
    assert (event["firstTimestamp"], event["lastTimestamp"]) == ("1970-01-01T00:01:01Z", "1970-01-01T00:01:01Z")
    assert 900 < len(event["message"].encode()) <= 1000


class EventsTaken:
    def __init__(self, failures=0):
        self.taken = []
        self._failures = failures

    def create_event(self, manifest):
        if self._failures:
            self._failures -= 1
            raise ApiError(403, "may not create events")
        self.taken.append(manifest["reason"])


def announce(api):
    async def work():
        announcer = Announcer(api.create_event, {"name": "digits-master", "namespace": "lab"})
        async with announcer.announcing():
            announcer.recorded("job_started", {"workers": "2"})
            announcer.recorded("worker_left", LEFT)
        announcer.recorded("exported", {})

    asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.parametrize(("failures", "taken"), [(0, ["JobStarted", "WorkerPreempted"]), (2, [])])
def test_what_is_left_at_the_end_is_told_and_of_a_cluster_that_takes_no_events_once(caplog, failures, taken):
    api = EventsTaken(failures)
    announce(api)
    assert api.taken == taken
    told = [record.levelname for record in caplog.records if "may not create" in record.message]
    assert told == ["WARNING"] * bool(failures)
