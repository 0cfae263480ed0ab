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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kubernetes import client

from tests.cluster.build import CLUSTER, find_programs
from tests.cluster.cluster import REPOSITORY, Cluster, new_client
from tests.cluster.kit import Pods, new_namespace
from tests.cluster.processes import Leashed
from tests.cluster.recipes import BuildError, Unavailable
from tests.cluster.session import NO_CLUSTER

NODES = {"n0": 3, "n1": 3}
_PROGRAMS = pytest.StashKey[Path | Unavailable | BuildError]()
_BUILDING = pytest.StashKey[Leashed]()


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
    """Begin to build what the cluster needs, if it is not there; of several test processes one does, the others wait for it."""
    if not session.config.option.collectonly and not CLUSTER.is_built and any(map(_needs_programs, session.items)):
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        command = [sys.executable, "-m", "tests.cluster.build"]
        session.config.stash[_BUILDING] = Leashed.start(command, Path(os.devnull), env)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Wait for the programs before the test's own time begins: the first build takes longer than a test may."""
    if _needs_programs(item) and _PROGRAMS not in item.config.stash:
        terminal = item.config.pluginmanager.get_plugin("terminalreporter")
        try:
            item.config.stash[_PROGRAMS] = find_programs(terminal.write_line if terminal else print)
        except (Unavailable, BuildError) as error:
            item.config.stash[_PROGRAMS] = error
    return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    if building := config.stash.get(_BUILDING, None):
        building.stop()


def _needs_programs(item: pytest.Item) -> bool:
    return "cluster" in getattr(item, "fixturenames", ()) and "ELASTICDL_TEST_KUBECONFIG" not in os.environ


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster | OutsideCluster]:
    """A running cluster; its nodes have the GPUs of ``NODES`` unless it is given from outside."""
    outside = os.environ.get("ELASTICDL_TEST_KUBECONFIG")
    if outside:
        yield OutsideCluster(Path(outside), os.environ.get("ELASTICDL_TEST_IMAGE", "python:3.11-slim"))
        return
    match request.config.stash[_PROGRAMS]:
        case Unavailable() as error:
            pytest.skip(f"{NO_CLUSTER}: {error}")
        case BuildError() as error:
            pytest.fail(str(error), pytrace=False)
        case programs:
            with Cluster(programs, NODES) as own:
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
