"""Fixtures that give tests a Kubernetes cluster: one for the whole session, a namespace for each test.

A test module has them with `pytest_plugins = ["tests.cluster.fixtures"]`.

ELASTICDL_TEST_KUBECONFIG   use this cluster (kind, minikube, a real one) instead of starting one
ELASTICDL_TEST_IMAGE        the image of the tests' pods there; it needs a shell and Python

What the clusters of a session need is built beside its tests, by a process of its own, and waited for by the first test
that has a cluster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kubernetes import client

from tests.cluster.build import CLUSTER, NODE, find_programs
from tests.cluster.cluster import REPOSITORY, Cluster, new_client
from tests.cluster.full.cluster import FullCluster, check_machine, find_full_programs
from tests.cluster.kit import Pods, new_namespace
from tests.cluster.processes import Leashed
from tests.cluster.recipes import BuildError, Unavailable
from tests.cluster.session import NO_CLUSTER

NODES = {"n0": 3, "n1": 3}
_PROGRAMS = pytest.StashKey[dict[str, Path | Unavailable | BuildError]]()
_BUILDING = pytest.StashKey[Leashed]()
# By the fixture that needs them.
_FIND: dict[str, Callable[[Callable[[str], None]], Path]]
_FIND = {"full_cluster": find_full_programs, "cluster": find_programs}


@dataclass(frozen=True, slots=True)
class OutsideCluster:
    """A cluster of somebody else's, in place of the one that the tests start."""

    kubeconfig: Path
    # One that has a shell and Python; the nodes of ``Cluster`` take any name.
    image: str

    def client(self) -> client.ApiClient:
        """The official client, as the user of the kubeconfig's current context."""
        return new_client(self.kubeconfig)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin to build what the clusters need, if it is not there; of several test processes one does, the others wait for it."""
    needed = {_needed(item) for item in session.items} - {None}
    if session.config.option.collectonly or not needed:
        return
    try:
        if "full_cluster" in needed:
            check_machine()
    except Unavailable:
        needed.discard("full_cluster")
    parts = [CLUSTER, NODE] if "full_cluster" in needed else [CLUSTER]
    if not all(part.is_built for part in parts):
        command = [sys.executable, "-m", "tests.cluster.build", *(["--node"] if NODE in parts else [])]
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        session.config.stash[_BUILDING] = Leashed.start(command, Path(os.devnull), env)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Wait for the programs before the test's own time begins: the first build takes longer than a test may."""
    name = _needed(item)
    found = item.config.stash.setdefault(_PROGRAMS, {})
    if name and name not in found:
        terminal = item.config.pluginmanager.get_plugin("terminalreporter")
        try:
            found[name] = _FIND[name](terminal.write_line if terminal else print)
        except (Unavailable, BuildError) as error:
            found[name] = error
    return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    if building := config.stash.get(_BUILDING, None):
        building.stop()


def _needed(item: pytest.Item) -> str | None:
    fixtures = getattr(item, "fixturenames", ())
    if "full_cluster" not in fixtures and "ELASTICDL_TEST_KUBECONFIG" in os.environ:
        return None
    return next((name for name in _FIND if name in fixtures), None)


def _programs(request: pytest.FixtureRequest, name: str) -> Path:
    match request.config.stash[_PROGRAMS][name]:
        case Unavailable() as error:
            pytest.skip(f"{NO_CLUSTER}: {error}")
        case BuildError() as error:
            pytest.fail(str(error), pytrace=False)
        case programs:
            return programs


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster | OutsideCluster]:
    """A running cluster; its nodes have the GPUs of ``NODES`` unless it is given from outside."""
    outside = os.environ.get("ELASTICDL_TEST_KUBECONFIG")
    if outside:
        yield OutsideCluster(Path(outside), os.environ.get("ELASTICDL_TEST_IMAGE", "python:3.11-slim"))
        return
    with Cluster(_programs(request, "cluster"), NODES) as own:
        yield own


@pytest.fixture(scope="session")
def full_cluster(request: pytest.FixtureRequest) -> Iterator[FullCluster]:
    """Real kubelets and containers, on nodes with the GPUs of ``NODES``."""
    with FullCluster(_programs(request, "full_cluster"), NODES) as own:
        yield own


@pytest.fixture
def own_cluster(cluster: Cluster | OutsideCluster) -> Cluster:
    """A cluster whose machines the test may do anything to, and whose nodes are ``tests.cluster.node``."""
    if isinstance(cluster, OutsideCluster):
        pytest.skip("ELASTICDL_TEST_KUBECONFIG gives a cluster whose nodes are not the tests' own")
    return cluster


@pytest.fixture
def namespace(cluster: Cluster | OutsideCluster) -> Iterator[str]:
    """A new namespace in which pods can be created; all of it goes with the test."""
    with new_namespace(cluster.client()) as name:
        yield name


@pytest.fixture
def pods(cluster: Cluster | OutsideCluster, namespace: str) -> Pods:
    """Makes and watches pods in the test's namespace."""
    return Pods(client.CoreV1Api(cluster.client()), namespace, cluster.image)
