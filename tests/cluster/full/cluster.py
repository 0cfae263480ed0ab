"""A whole cluster: `Cluster` with machines on which a kubelet runs real containers.

    with FullCluster(find_full_programs(), nodes={"n0": 3, "n1": 3}) as cluster:      # GPUs of each node
        core = kubernetes.client.CoreV1Api(cluster.client())

The GPUs are only counted: a container is told nothing of them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kubernetes import client

from tests.cluster.build import NODE
from tests.cluster.cluster import Cluster
from tests.cluster.full import leftovers
from tests.cluster.full.images import TEST_IMAGE, elasticdl_image, pause_image
from tests.cluster.full.network import MOST_NODES, Network
from tests.cluster.full.node import import_image
from tests.cluster.full.settings import SOCKET, NodeSettings
from tests.cluster.pki import Pair
from tests.cluster.processes import Leashed

_GPU = "nvidia.com/gpu"
_LOADED_WITHIN_S = 60.0


class FullCluster(Cluster):
    """Everything of it ends with ``stop``, or with this process. Its folder is removed; until then it holds all logs."""

    # Of Python and this repository as they are on this machine, for a user who is not root.
    image = TEST_IMAGE
    services_user = "system:kube-proxy"  # sees no pods, and needs none

    def __init__(self, programs: Path, nodes: Mapping[str, int]) -> None:
        """``nodes`` has the GPUs by name, at most `MOST_NODES` at a time."""
        super().__init__(programs, nodes)
        self._network: Network | None = None
        self._gpus: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._prepared: dict[str, Path] = {}

    def wait_for_node(self, name: str) -> None:
        """Returns when pods can be placed on the node, and its GPUs are counted."""
        core = client.CoreV1Api(self.client())
        wanted = str(self._gpus[name])

        def counted() -> bool:
            self._check_node(name)
            if not self._prepared[name].exists():
                return False
            try:
                status = core.read_node(name).status
                assert status is not None
                if (status.capacity or {}).get(_GPU) != wanted:
                    core.patch_node_status(name, {"status": {"capacity": {_GPU: wanted}}})
                return (status.allocatable or {}).get(_GPU) == wanted
            except client.ApiException as error:
                if error.status not in (404, 409):  # it has not registered; it wrote at the same time
                    raise
                return False

        self._wait(counted, f"node {name} is not ready (logs: {self.logs}/*{name}*.log)")
        super().wait_for_node(name)

    def load_image(self, archive: Path) -> None:
        """Give every node the image of an archive, as `docker save` writes it; there is no registry to pull from."""
        for name in self.node_names:
            command = import_image(str(self.folder / "nodes" / name / SOCKET), archive)
            command[0] = str(NODE.folder() / command[0])
            subprocess.run(command, capture_output=True, timeout=_LOADED_WITHIN_S, check=True)

    @property
    def _net(self) -> Network:
        assert self._network is not None, "the cluster has not been started"
        return self._network

    def _connect(self) -> str:
        images = self.folder / "images"
        images.mkdir()
        pause_image(NODE.folder() / "root/bin/busybox").write(images / "pause.tar")
        elasticdl_image().write(images / "elasticdl.tar")
        self._network = Network.open(self.folder)
        return self._network.plan.host

    def _disconnect(self) -> None:
        if self._network is not None:
            self._network.close()

    def _launch(self, name: str, gpus: int, identity: Pair, services: Pair, own: Path) -> Leashed:
        self._gpus[name] = gpus
        place = self._place(name)
        users = (("kubelet", f"system:node:{name}", identity), ("services", self.services_user, services))
        for file, user, pair in users:
            self._plane.write_kubeconfig(own / f"{file}.kubeconfig", user, pair)
        settings = NodeSettings(
            name=name,
            place=place,
            network=self._net.plan.number,
            switch=self._net.pid,
            kubernetes=str(self._programs),
            programs=str(NODE.folder()),
            folder=str(own),
            logs=str(self.logs),
            images=str(self.folder / "images"),
            server=self.server,
            authority=str(self._plane.authority_file),
            services_certificate=str(services.certificate),
            services_key=str(services.key),
        )
        self._prepared[name] = settings.prepared
        alone = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        afterwards = [sys.executable, "-I", "-S", leftovers.__file__, settings.group, str(own)]
        command = [*alone, sys.executable, "-m", "tests.cluster.full.node"]
        return self._run_node(settings, command, self.folder, afterwards)

    def _place(self, name: str) -> int:
        """Its number; a lost node's successor under the same name takes its place."""
        taken = {self._places[other] for other in self.node_names if other != name}
        if name not in self._places or self._places[name] in taken:
            self._places[name] = next(place for place in range(MOST_NODES) if place not in taken)
        return self._places[name]
