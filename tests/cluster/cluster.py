"""A Kubernetes cluster for tests: a real control plane, and nodes that run containers as local processes.

    with Cluster(nodes={"n0": 3, "n1": 3}) as cluster:      # GPUs of each node
        core = kubernetes.client.CoreV1Api(cluster.client())

What the nodes can and cannot do is written in ``tests.cluster.node``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kubernetes import client, config

from tests.cluster.control_plane import HOST, ControlPlane, ControlPlaneError, last_line, wait_for
from tests.cluster.processes import Leashed
from tests.cluster.settings import NodeSettings, ProcessNodeSettings

_NODE_READY_WITHIN_S = 60.0
REPOSITORY = Path(__file__).resolve().parents[2]


class Cluster:
    """Everything of it ends with ``stop``, or with this process. Its folder is removed; until then it holds all logs."""

    # Any name does: images are not looked at, see ``tests.cluster.node``.
    image = "local/host"

    def __init__(self, programs: Path, nodes: Mapping[str, int]) -> None:
        """``programs``: their folder; ``nodes`` has the GPUs by name."""
        self._programs = programs
        self._wanted = nodes
        self._nodes: dict[str, Leashed] = {}
        self._undo = contextlib.ExitStack()

    def start(self) -> None:
        """Returns when pods can be created and all nodes are ready for them.

        Raises:
            ControlPlaneError: it did not come up; nothing is left of it.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="elasticdl-cluster-"))
        # Of the control plane, the nodes and, below ``pods``, of every container that ran.
        self.logs = self.folder / "logs"
        self._plane = ControlPlane(self.folder, self._programs)
        try:
            self._plane.start(self._connect())
            self.kubeconfig = self._plane.admit(self.folder / "admin", "admin", ["system:masters"])
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
        for name in self.node_names:
            self.lose_node(name)
        self._plane.stop()
        self._undo.close()
        shutil.rmtree(self.folder)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def node_names(self) -> list[str]:
        """Of the nodes whose machines run."""
        return list(self._nodes)

    def client(self) -> client.ApiClient:
        """The official client, as administrator."""
        return new_client(self.kubeconfig)

    def add_node(self, name: str, gpus: int, *, wait: bool = True) -> None:
        """One more machine; also a lost one's successor under the same name."""
        own = self.folder / "nodes" / name
        own.mkdir(parents=True, exist_ok=True)
        (self.logs / "pods").mkdir(exist_ok=True)
        self._plane.admit(own / "kubelet", f"system:node:{name}", ["system:nodes"])
        self._plane.admit(own / "services", "services", ["system:masters"])
        told = {"name": name, "server": self._plane.server, "authority": str(self._plane.authority.file), "gpus": gpus}
        self._nodes[name] = self._launch({**told, "folder": str(own), "logs": str(self.logs)})
        if wait:
            self.wait_for_node(name)

    def wait_for_node(self, name: str) -> None:
        """Returns when pods can be placed on the node."""
        core = client.CoreV1Api(self.client())

        def is_ready() -> bool:
            self._check_node(name)
            with contextlib.suppress(client.ApiException):  # it has not registered; it wrote at the same time
                return self._is_ready(core.read_node(name))
            return False

        otherwise = f"node {name} is not ready (logs: {self.logs}/*{name}*.log)"
        wait_for(is_ready, lambda: otherwise, _NODE_READY_WITHIN_S)

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

    def _check_node(self, name: str) -> None:
        if not self._nodes[name].running:
            raise ControlPlaneError(f"node {name} has ended: {last_line(self._log_of(name))}")

    def _connect(self) -> str:
        """Have the address at which the nodes will reach the API server; what ``_undo`` does is done at the end."""
        return HOST

    def _is_ready(self, node: Any) -> bool:
        """As the API server has it."""
        return not node.spec.taints

    def _launch(self, told: dict[str, Any]) -> Leashed:
        """The machine of a node; ``told``: what all nodes are."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        image = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "LANG": "C.UTF-8"}
        return self._run_node(ProcessNodeSettings(**told, environment=image), "tests.cluster.node.node")

    def _run_node(
        self, settings: NodeSettings, module: str, within: Sequence[str] = (), afterwards: Sequence[str] = ()
    ) -> Leashed:
        """A program that is told the path of a node's settings."""
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        command = [*within, sys.executable, "-m", module, str(settings.write())]
        return Leashed.start(command, self._log_of(settings.name), env, self.folder, afterwards)

    def _log_of(self, name: str) -> Path:
        return self.logs / f"node-{name}.log"


def new_client(kubeconfig: Path) -> client.ApiClient:
    """The official client, as the user of the current context."""
    made: client.ApiClient = config.new_client_from_config(str(kubeconfig))
    return made
