"""What the experiments take down of each pod: when each fact of it was first seen."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client

from benchmarks.experiments.pods import Fact, PodTimes, facts_of


def pod(*, node: bool, state: str, deleted: bool) -> dict:
    metadata = {"name": "one", **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {})}
    containers = (
        [{"name": "main", "state": {state: {}}}] if state == "none" else [{"name": "main", "state": {state: {"a": 1}}}]
    )
    status = {"phase": "Pending", "containerStatuses": [] if state == "none" else containers}
    return {"metadata": metadata, "spec": {"nodeName": "n0"} if node else {}, "status": status}


def test_the_facts_of_a_pod_from_its_creation_to_its_end():
    assert facts_of(pod(node=False, state="none", deleted=False)) == {Fact.CREATED}
    assert facts_of(pod(node=True, state="waiting", deleted=False)) == {Fact.CREATED, Fact.BOUND}
    running = facts_of(pod(node=True, state="running", deleted=False))
    assert running == {Fact.CREATED, Fact.BOUND, Fact.RUNNING}
    assert facts_of(pod(node=True, state="running", deleted=True)) - running == {Fact.NOTICE}
    ended = facts_of(pod(node=True, state="terminated", deleted=True))
    assert ended == {Fact.CREATED, Fact.BOUND, Fact.NOTICE, Fact.ENDED}


@given(st.lists(st.tuples(st.sampled_from(["waiting", "running", "terminated"]), st.booleans()), min_size=1))
def test_a_fact_has_the_time_at_which_it_was_first_seen(changes):
    clock = itertools.count(1.0)
    core = client.CoreV1Api(client.ApiClient(client.Configuration(host="https://nobody.invalid")))
    times = PodTimes(core, "n", lambda: next(clock))
    first: dict[Fact, float] = {}
    for number, (state, deleted) in enumerate(changes, 1):
        seen = pod(node=True, state=state, deleted=deleted)
        times.see({"one": seen})
        for fact in facts_of(seen):
            first.setdefault(fact, float(number))
    assert times.all()["one"] == first
    times.see({})
    first = {Fact.ENDED: len(changes) + 1.0, Fact.GONE: len(changes) + 1.0} | first
    assert times.all()["one"] == first
