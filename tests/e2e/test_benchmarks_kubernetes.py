"""The benchmarks of the Kubernetes side run, with the smallest settings, on the session's cluster. No speeds are asserted."""

from __future__ import annotations

import itertools
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client
from test_benchmarks_tiny import run, summaries

from benchmarks.counted_master import verb_and_resource
from benchmarks.experiments.pods import Fact, PodTimes, facts_of

pytest_plugins = ["tests.cluster.fixtures"]

GPUS = 2


@pytest.fixture
def node(own_cluster):
    """A node with `GPUS` GPUs, gone after the test."""
    name = f"lag-{secrets.token_hex(3)}"
    own_cluster.add_node(name, GPUS)
    yield name
    own_cluster.lose_node(name)
    client.CoreV1Api(own_cluster.client()).delete_node(name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_reclaim_lag(own_cluster, node, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    where = ["--cluster", "kubeconfig", "--image", "local/host", "--node", node]
    monkeypatch.setenv("KUBECONFIG", str(own_cluster.kubeconfig))
    arguments = ["--workers", str(GPUS), "--repetitions", "1", "--settle", "0.1", "--hold", "0.1"]
    found = {
        entry["event"]: entry for entry in summaries(run(tmp_path / "out.jsonl", "reclaim_lag", *where, *arguments))
    }
    assert set(found) == {"taken", "given"}
    parts = {"taken": ("step", "leave", "exit", "object"), "given": ("scheduler", "start", "warm_up", "join")}
    for kind, names in parts.items():
        assert sum(found[kind][name]["median"] for name in names) == pytest.approx(
            found[kind]["total"]["median"], abs=1e-3
        )
        assert all(found[kind][name]["median"] > 0 for name in names[2:])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kubernetes_scale(own_cluster, tmp_path, monkeypatch):
    where = ["--cluster", "kubeconfig", "--image", "local/host"]
    monkeypatch.setenv("KUBECONFIG", str(own_cluster.kubeconfig))
    entries = run(tmp_path / "out.jsonl", "kubernetes_scale", *where, "--workers", "10", "--steady", "1")
    (sample,) = [entry for entry in entries if entry["kind"] == "run"]
    requests = sample["requests"]
    assert requests["start"]["create pods"] == 10
    assert requests["grow"]["create pods"] == requests["one_end"]["create pods"] == 1
    assert requests["deletion"]["create pods"] == 1
    assert (
        requests["start"]["list pods"] == 2
    )  # its own and those of its predecessors; workers are watched from then on
    assert not any("list pods" in counts for reaction, counts in requests.items() if reaction != "start")
    for reaction in ("start", "grow", "one_end", "deletion"):
        assert 0 < sample[reaction]["first"] <= sample[reaction]["last"] <= sample[reaction]["world"]
    assert sample["memory"] > 10


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/api/v1/namespaces/a/pods", ("create", "pods")),
        ("GET", "/api/v1/namespaces/a/pods?labelSelector=x", ("list", "pods")),
        ("GET", "/api/v1/namespaces/a/pods?watch=True&resourceVersion=7", ("watch", "pods")),
        ("GET", "/api/v1/namespaces/a/pods/one", ("get", "pods")),
        ("DELETE", "/api/v1/namespaces/a/pods/one", ("delete", "pods")),
        ("DELETE", "/api/v1/namespaces/a/pods?labelSelector=x", ("deletecollection", "pods")),
        ("PATCH", "/apis/batch/v1/namespaces/a/jobs/one", ("patch", "jobs")),
        ("PATCH", "/api/v1/namespaces/a/configmaps/one", ("patch", "configmaps")),
    ],
)
def test_requests_have_the_names_that_a_role_has_for_them(method, path, expected):
    assert verb_and_resource(method, f"https://127.0.0.1:6443{path}") == expected


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
