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
from tests.cluster.full.images import TEST_IMAGE, elasticdl_image, pause_image
from tests.cluster.full.network import MOST_NODES, Network
from tests.cluster.full.settings import KubeletSettings
from tests.cluster.processes import Leashed
from tests.cluster.recipes import Unavailable, or_unavailable

_TOOLS = ("unshare", "nsenter", "ip", "mount")
_GROUPS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "pids")
_TRIED_WITHIN_S = 20.0


class FullCluster(Cluster):
    """Everything of it ends with ``stop``, or with this process. Its folder is removed; until then it holds all logs."""

    # Of Python and this repository as they are on this machine, for a user who is not root.
    image = TEST_IMAGE

    def __init__(self, programs: Path, nodes: Mapping[str, int]) -> None:
        """``nodes`` has the GPUs by name, at most `MOST_NODES` at a time."""
        super().__init__(programs, nodes)
        self._told: dict[str, KubeletSettings] = {}

    def wait_for_node(self, name: str) -> None:
        """Returns when pods can be placed on the node, and its GPUs are counted."""
        core = client.CoreV1Api(self.client())
        told, wanted = self._told[name], str(self._told[name].gpus)

        def counted() -> bool:
            self._check_node(name)
            if not told.prepared.exists():
                return False
            try:
                status = core.read_node(name).status
                assert status is not None
                if (status.capacity or {}).get(GPU) != wanted:
                    core.patch_node_status(name, {"status": {"capacity": {GPU: wanted}}})
                return (status.allocatable or {}).get(GPU) == wanted
            except client.ApiException as error:
                if error.status not in (404, 409):  # it has not registered; it wrote at the same time
                    raise
                return False

        self._wait(counted, f"node {name} is not ready (logs: {self.logs}/*{name}*.log)")
        super().wait_for_node(name)

    def _connect(self) -> str:
        images = self.folder / "images"
        images.mkdir()
        pause_image(NODE.folder() / "root/bin/busybox").write(images / "pause.tar")
        elasticdl_image().write(images / "elasticdl.tar")
        self._network = Network.open(self.folder)
        self._undo.callback(self._network.close)
        return self._network.plan.host

    def _launch(self, told: dict[str, Any]) -> Leashed:
        name = told["name"]
        taken = {self._told[other].place for other in self.node_names if other != name}
        # A lost node's successor under the same name takes its place.
        before = self._told[name].place if name in self._told else None
        free = [place for place in (before, *range(MOST_NODES)) if place is not None and place not in taken]
        settings = self._told[name] = KubeletSettings(
            **told,
            place=free[0],
            network=self._network.plan.number,
            switch=self._network.pid,
            kubernetes=str(self._programs),
            programs=str(NODE.folder()),
            images=str(self.folder / "images"),
        )
        alone = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        afterwards = [sys.executable, "-I", "-S", leftovers.__file__, settings.group, settings.folder]
        return self._run_node(settings, ["-m", "tests.cluster.full.node"], alone, afterwards)


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
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)} not found: install util-linux, mount and iproute2")
    lacking = [name for name in _GROUPS if not os.access(leftovers.HIERARCHIES / name / "tasks", os.W_OK)]
    if lacking:
        raise Unavailable(f"no writable control groups (version 1) for {', '.join(lacking)} in {leftovers.HIERARCHIES}")
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/run"]
    with or_unavailable("namespaces cannot be made"):
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_TRIED_WITHIN_S, check=False)
    if tried.returncode:
        raise Unavailable(f"namespaces cannot be made: {tried.stderr.strip()}")
