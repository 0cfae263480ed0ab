"""Real kubelets and containers do what the test cluster's own nodes do; and what only they can."""

from __future__ import annotations

import threading

import pytest

from elasticdl.kube.job_pods import forwarded
from elasticdl.kube.names import Role, labels
from tests.cluster.kit import shell
from tests.contract.test_cluster import (  # noqa: F401
    test_a_container_sees_what_its_manifest_gives_it,
    test_an_image_that_cannot_be_pulled,
    test_deletion_sends_sigterm_and_tells_the_exit_status,
    test_how_a_container_ended_is_told,
    test_the_name_of_a_service_leads_to_its_pod_and_to_the_next,
)
from tests.contract.test_port_forward import is_left, say

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def cluster(full_cluster):
    """What the shared tests run on here."""
    return full_cluster


def test_a_port_forward_to_a_port_that_nobody_listens_on_just_ends(place, pods, monkeypatch):
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    pods.create("deaf", shell("exec sleep 1000"))
    pods.core.patch_namespaced_pod("deaf", pods.namespace, {"metadata": {"labels": labels("j", Role.MASTER)}})
    pods.running("deaf")
    with forwarded(place, "j") as address:
        assert say(address, b"hello") == b""
    assert is_left() == []
    assert failures == []
