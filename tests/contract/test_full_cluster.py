"""Real kubelets and containers do what the test cluster's own nodes do; and what only they can."""

from __future__ import annotations

import threading

import pytest

from elasticdl.cli.kubernetes.port_forward import forwarded
from elasticdl.common.manifests.names import Role, labels
from tests.cluster.kit import shell
from tests.contract.test_cluster import (  # noqa: F401
    test_a_container_that_keeps_failing_is_held_back,
    test_a_failed_container_is_started_again_with_its_volume,
    test_a_pod_reaches_the_api_with_its_account_and_no_further,
    test_a_program_that_does_not_exist_fails_the_pod,
    test_an_image_that_cannot_be_pulled,
    test_deletion_sends_sigterm_and_tells_the_exit_status,
    test_environment_from_values_fields_secrets_and_config_maps,
    test_exit_status_and_log_of_a_container_are_told,
    test_logs_are_followed_and_cut,
    test_volumes_are_found_where_command_and_environment_say,
)
from tests.contract.test_port_forward import is_left, place, say  # noqa: F401

pytest_plugins = ["tests.cluster.fixtures"]


@pytest.fixture(scope="session")
def cluster(full_cluster):
    """What the shared tests run on here."""
    return full_cluster


def test_a_port_forward_to_a_port_that_nobody_listens_on_just_ends(place, pods, monkeypatch):  # noqa: F811
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    pods.create("deaf", shell("exec sleep 1000"))
    pods.core.patch_namespaced_pod("deaf", pods.namespace, {"metadata": {"labels": labels("j", Role.MASTER)}})
    pods.running("deaf")
    with forwarded(place, "j") as address:
        assert say(address, b"hello") == b""
    assert is_left() == []
    assert failures == []
