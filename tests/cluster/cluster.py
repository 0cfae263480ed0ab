"""A Kubernetes cluster for tests: a real control plane, and nodes that run containers as local processes.

    with Cluster(nodes={"n0": 3, "n1": 3}) as cluster:      # GPUs of each node
        core = kubernetes.client.CoreV1Api(cluster.client())

What the nodes can and cannot do is written in ``tests.cluster.node``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from kubernetes import client, config

from tests.cluster.control_plane import HOST, ControlPlane, ControlPlaneError
from tests.cluster.node.node import NodeSettings
from tests.cluster.pki import Pair
from tests.cluster.processes import Leashed

_NODE_READY_WITHIN_S = 60.0
_POLL_S = 0.1
REPOSITORY = Path(__file__).resolve().parents[2]


class Cluster:
    """Everything of it ends with ``stop``, or with this process. Its folder is removed; until then it holds all logs."""

    # Any name does: images are not looked at, see ``tests.cluster.node``.
    image = "local/host"
    # Whom Kubernetes lets see all Services and pods, by a role that is there from the beginning; a node sees its own pods.
    services_user = "system:kube-scheduler"

    def __init__(self, programs: Path, nodes: Mapping[str, int]) -> None:
        """``programs``: their folder; ``nodes`` has the GPUs by name."""
        self._programs = programs
        self._wanted = nodes
        self._nodes: dict[str, Leashed] = {}

    def start(self) -> None:
        """Returns when pods can be created and all nodes are ready for them.

        Raises:
            ControlPlaneError: it did not come up; nothing is left of it.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="elasticdl-cluster-"))
        self.kubeconfig = self.folder / "kubeconfig"
        self._plane = ControlPlane(self.folder, self._programs)
        try:
            self._plane.start(self._connect())
            self._plane.write_admin_kubeconfig(self.kubeconfig)
            for name, gpus in self._wanted.items():
                self.add_node(name, gpus, wait=False)
            self._plane.wait_for_accounts()
            for name in self._wanted:
                self.wait_for_node(name)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill every process of the cluster and of its pods, and remove the folder."""
        for node in self._nodes.values():
            node.kill()
        while self._nodes:
            self._nodes.popitem()[1].stop()
        self._plane.stop()
        self._disconnect()
        shutil.rmtree(self.folder)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self._plane.server

    @property
    def logs(self) -> Path:
        """Logs of the control plane, the nodes and, below ``pods``, of every container that ran."""
        return self.folder / "logs"

    @property
    def node_names(self) -> list[str]:
        """Of the nodes whose machines run."""
        return list(self._nodes)

    def client(self) -> client.ApiClient:
        """The official client, as administrator."""
        found: client.ApiClient = config.new_client_from_config(str(self.kubeconfig))
        return found

    def add_node(self, name: str, gpus: int, *, wait: bool = True) -> None:
        """One more machine; also a lost one's successor under the same name."""
        own = self.folder / "nodes" / name
        own.mkdir(parents=True, exist_ok=True)
        (self.logs / "pods").mkdir(exist_ok=True)
        unique = f"{name}-{time.monotonic_ns()}"  # a name may come back
        identity = self._plane.issue(f"node-{unique}", f"system:node:{name}", ["system:nodes"])
        services = self._plane.issue(f"services-{unique}", self.services_user, [])
        self._nodes[name] = self._launch(name, gpus, identity, services, own)
        if wait:
            self.wait_for_node(name)

    def wait_for_node(self, name: str) -> None:
        """Returns when pods can be placed on the node."""
        core = client.CoreV1Api(self.client())

        def is_ready() -> bool:
            self._check_node(name)
            with contextlib.suppress(client.ApiException):
                spec = core.read_node(name).spec
                return spec is not None and not spec.taints
            return False

        self._wait(is_ready, f"node {name} is not ready (log: {self.logs / f'node-{name}.log'})")

    def lose_node(self, name: str) -> None:
        """The machine loses its power: its pods end at once, and nobody tells the API server."""
        self._nodes.pop(name).stop()

    def freeze_node(self, name: str) -> None:
        """The machine loses its network to the control plane: its pods run on, and it is not heard of."""
        self._nodes[name].signal(signal.SIGSTOP)

    def thaw_node(self, name: str) -> None:
        """A frozen node is back, and learns what it has missed."""
        self._nodes[name].signal(signal.SIGCONT)

    def restart_api_server(self, down_s: float = 0.0) -> None:
        """The API server crashes and is back ``down_s`` later; returns when it answers again."""
        self._plane.restart_api_server(down_s)

    def check(self) -> None:
        """Raises ControlPlaneError if a program of the cluster has ended by itself."""
        self._plane.check()
        for name in self._nodes:
            self._check_node(name)

    def _connect(self) -> str:
        """Have the address at which the nodes will reach the API server; ``_disconnect`` undoes it, also half of it."""
        return HOST

    def _disconnect(self) -> None:
        pass

    def _launch(self, name: str, gpus: int, identity: Pair, services: Pair, own: Path) -> Leashed:
        """The machine of a node, which looks at Services with ``services``; what it writes for itself goes below ``own``."""
        settings = NodeSettings(
            name=name,
            server=self.server,
            authority=str(self._plane.authority_file),
            certificate=str(identity.certificate),
            key=str(identity.key),
            services_certificate=str(services.certificate),
            services_key=str(services.key),
            folder=str(own),
            logs=str(self.logs / "pods"),
            gpus=gpus,
            environment=_image_environment(),
        )
        return self._run_node(settings, [sys.executable, "-m", "tests.cluster.node"], own)

    def _run_node(self, settings: Any, command: list[str], folder: Path, afterwards: Sequence[str] = ()) -> Leashed:
        """Run a command that is told the path of a node's settings."""
        file = Path(settings.folder) / "settings.json"
        file.write_text(json.dumps(asdict(settings)))
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return Leashed.start([*command, str(file)], self.logs / f"node-{settings.name}.log", env, folder, afterwards)

    def _check_node(self, name: str) -> None:
        if not self._nodes[name].running:
            log = self.logs / f"node-{name}.log"
            last = (log.read_text(errors="replace").splitlines() or ["no output"])[-1]
            raise ControlPlaneError(f"node {name} has ended: {last} (log: {log})")

    def _wait(self, done: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + _NODE_READY_WITHIN_S
        while not done():
            if time.monotonic() > deadline:
                raise ControlPlaneError(f"{otherwise}, after {_NODE_READY_WITHIN_S:g} s")
            time.sleep(_POLL_S)


def _image_environment() -> dict[str, str]:
    """What an image with this repository and its Python would set."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {"PATH": path, "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8"}
