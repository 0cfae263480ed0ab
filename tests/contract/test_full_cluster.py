"""Real kubelets and containers do what the test cluster's own nodes do; and what only they can."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from elasticdl.kube.job_pods import forwarded
from elasticdl.kube.names import Role, labels
from tests.cluster.build import Unavailable
from tests.cluster.full import leftovers
from tests.cluster.full.cluster import check_machine
from tests.cluster.full.images import REPOSITORY
from tests.cluster.kit import shell
from tests.contract.test_cluster import (  # noqa: F401
    file_within,
    test_a_container_sees_what_its_manifest_gives_it,
    test_an_image_that_cannot_be_pulled,
    test_deletion_sends_sigterm_and_tells_the_exit_status,
    test_how_a_container_ended_is_told,
    test_the_name_of_a_service_leads_to_its_pod_and_to_the_next,
)
from tests.contract.test_port_forward import is_left, say

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow


HOLDER = """
import pathlib, sys, time
from tests.cluster.full import leftovers
from tests.cluster.full.network import Network
from tests.cluster.processes import Leashed
folder = pathlib.Path(sys.argv[1])
network = Network.open(folder)
group = network.plan.interface
leftovers.make_groups(group)
(folder / "own").mkdir()
busy = f"echo 0 > {leftovers.HIERARCHIES}/memory/{group}/tasks; echo {group} > {folder}/ready; sleep 1000"
afterwards = [sys.executable, leftovers.__file__, group, str(folder / "own")]
command = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", busy]
Leashed.start(command, folder / "log", folder=folder, afterwards=afterwards)
time.sleep(1000)
"""


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


def test_neither_network_nor_control_groups_outlive_the_process_that_holds_the_leash(tmp_path):
    try:
        check_machine()
    except Unavailable as error:
        pytest.skip(str(error))
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], env=env) as holder:
        name = file_within(20, tmp_path / "ready")
        kept = [Path("/sys/class/net") / name, leftovers.HIERARCHIES / "memory" / name, tmp_path / "own"]
        assert all(path.exists() for path in kept)
        holder.kill()
    deadline = time.monotonic() + 20
    while any(path.exists() for path in kept):
        assert time.monotonic() < deadline, [path for path in kept if path.exists()]
        time.sleep(0.02)
