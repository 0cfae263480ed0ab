"""Fixtures that give tests a Kubernetes cluster: one for the whole session, a namespace for each test.

A test module has them with `pytest_plugins = ["tests.cluster.fixtures"]`.

ELASTICDL_TEST_KUBECONFIG   use this cluster (kind, minikube, a real one) instead of starting one
ELASTICDL_TEST_IMAGE        the image of the tests' pods there; it needs a shell and Python
KUBEBUILDER_ASSETS          a folder with the control plane's programs, to use instead of building them
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from tests.cluster.build import Unavailable
from tests.cluster.cluster import Cluster
from tests.cluster.full.cluster import FullCluster
from tests.cluster.full.machine import find_full_programs
from tests.cluster.kit import Pods, new_namespace
from tests.cluster.outside import OutsideCluster
from tests.cluster.programs import Programs, find_programs

NODES = {"n0": 3, "n1": 3}
_PROGRAMS = pytest.StashKey[dict[str, Programs | str]]()
# By the fixture that needs them; the one that needs more comes first, as one build of all takes less than two.
# A test that has a `cluster` of its own, in terms of `full_cluster`, needs no other.
_FIND = {"full_cluster": find_full_programs, "cluster": find_programs}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what the clusters need before any test begins: the first build takes longer than a test may."""
    if session.config.option.collectonly:
        return
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    found = session.config.stash.setdefault(_PROGRAMS, {})
    needed = {_needed(item) for item in session.items}
    for name in (each for each in _FIND if each in needed):
        try:
            found[name] = _FIND[name](terminal.write_line if terminal else print)
        except Unavailable as error:
            found[name] = f"no Kubernetes cluster: {error}"


def _needed(item: pytest.Item) -> str | None:
    fixtures = getattr(item, "fixturenames", ())
    if "full_cluster" not in fixtures and "ELASTICDL_TEST_KUBECONFIG" in os.environ:
        return None
    return next((name for name in _FIND if name in fixtures), None)


def _programs(request: pytest.FixtureRequest, name: str) -> Programs:
    found = request.config.stash[_PROGRAMS][name]
    if isinstance(found, str):
        pytest.skip(found)
    return found


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


@pytest.fixture(scope="session")
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
