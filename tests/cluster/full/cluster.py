"""A whole cluster: `Cluster` with machines on which a kubelet runs real containers.

    with FullCluster(find_full_programs(), nodes={"n0": 3, "n1": 3}) as cluster:      # GPUs of each node
        core = kubernetes.client.CoreV1Api(cluster.client())

The GPUs are only counted: a container is told nothing of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kubernetes import client

from elasticdl.job.quantities import GPU
from tests.cluster.build import CLUSTER, NODE, require
from tests.cluster.cluster import Cluster
from tests.cluster.full import leftovers
from tests.cluster.full.configuration import KubeletSettings
from tests.cluster.full.images import TEST_IMAGE, write_elasticdl_image, write_pause_image
from tests.cluster.full.network import MOST_NODES, Network
from tests.cluster.processes import Leashed
from tests.cluster.recipes import Unavailable, or_unavailable

_TOOLS = ("unshare", "nsenter", "ip", "mount")
_GROUPS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "pids")
_ALONE = ["unshare", "--net", "--mount", "--pid", "--fork"]
_TRIED_WITHIN_S = 20.0


class FullCluster(Cluster):
    """Everything of it ends with ``stop``, or with this process. Its folder is removed; until then it holds all logs."""

    # Of Python and this repository as they are on this machine, for a user who is not root.
    image = TEST_IMAGE

    def __init__(self, programs: Path, nodes: Mapping[str, int]) -> None:
        """``nodes`` has the GPUs by name, at most `MOST_NODES` names in the cluster's life."""
        super().__init__(programs, nodes)
        self._told: dict[str, KubeletSettings] = {}

    def _connect(self) -> str:
        images = self.folder / "images"
        images.mkdir()
        write_pause_image(images / "pause.tar", NODE.folder() / "root/bin/busybox")
        write_elasticdl_image(images / "elasticdl.tar")
        self._network = Network.open(self.folder)
        self._undo.callback(self._network.close)
        return self._network.plan.host

    def _is_ready(self, node: Any) -> bool:
        """Also, its GPUs are counted."""
        told = self._told[node.metadata.name]
        gpus = {GPU: str(told.gpus)}.items()
        if told.prepared.exists() and not gpus <= (node.status.capacity or {}).items():
            client.CoreV1Api(self.client()).patch_node_status(told.name, {"status": {"capacity": dict(gpus)}})
        return told.prepared.exists() and gpus <= (node.status.allocatable or {}).items() and super()._is_ready(node)

    def _launch(self, told: dict[str, Any]) -> Leashed:
        name = told["name"]
        settings = self._told[name] = KubeletSettings(
            **told,
            place=self._told[name].place if name in self._told else len(self._told),
            network=self._network.plan.number,
            switch=self._network.pid,
            kubernetes=str(self._programs),
            programs=str(NODE.folder()),
            images=str(self.folder / "images"),
        )
        assert settings.place < MOST_NODES
        afterwards = [sys.executable, "-I", "-S", leftovers.__file__, settings.group, settings.folder]
        within = [*_ALONE, "--kill-child", "--propagation", "private"]
        return self._run_node(settings, "tests.cluster.full.node", within, afterwards)


def find_full_programs(say: Callable[[str], None] = print) -> Path:
    """Those of the control plane and, in their cache, of the nodes; may take its time to build them.

    Raises:
        Unavailable: they cannot be built or used here.
        BuildError: they could not be built.
    """
    check_machine()
    require([CLUSTER, NODE], say)
    return CLUSTER.folder()


def check_machine() -> None:
    """
    Raises:
        Unavailable: this machine, or who we are on it, does not allow a node's namespaces and control groups.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("kubelets and containers need Linux and root")
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise Unavailable(f"{', '.join(missing)} not found: install util-linux, mount and iproute2")
    if lacking := [name for name in _GROUPS if not os.access(leftovers.HIERARCHIES / name / "tasks", os.W_OK)]:
        raise Unavailable(f"no writable control groups (version 1) for {', '.join(lacking)} in {leftovers.HIERARCHIES}")
    command = [*_ALONE, "mount", "-t", "tmpfs", "tmpfs", "/run"]
    with or_unavailable("namespaces cannot be made"):
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_TRIED_WITHIN_S, check=False)
    if tried.returncode:
        raise Unavailable(f"namespaces cannot be made: {tried.stderr.strip()}")
