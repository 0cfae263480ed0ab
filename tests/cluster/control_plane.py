"""A real control plane on this machine: etcd, API server, scheduler, controller manager.

Nothing listens but on 127.0.0.1, and where its nodes cannot reach that, the API server on the address given for them.

Connections are authenticated with certificates of the plane's own authority; etcd is reached by a socket of its own folder.
"""

from __future__ import annotations

import random
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from tests.cluster.credentials import Authority, write_key, write_kubeconfig
from tests.cluster.processes import Leashed

HOST = "127.0.0.1"
SERVICES = "10.96.0.0/16"
_READY_WITHIN_S = 120.0
_POLL_S = 0.1
# Much less than a real cluster's. A node renews its lease every 2 s, on a machine that may be busy.
_NODE_GRACE_S = 12
_TOLERATION_S = 2


class ControlPlaneError(Exception):
    """A program of the cluster does not run; the message says where its log is."""


class ControlPlane:
    """The four programs, in one folder."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._folder = folder
        self._programs = programs
        self._processes: dict[str, Leashed] = {}
        self._etcd = f"unix://{folder}/etcd.sock"
        self._pki = folder / "pki"

    def start(self, host: str = HOST) -> None:
        """Returns when the API server answers at ``host``; ``wait_for_accounts`` says when pods can be created.

        Raises:
            ControlPlaneError: one of them ended, or was not ready in time.
        """
        self._host = host
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        self.authority = Authority.create(self._pki)
        names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        self.authority.issue(self._pki / "apiserver", "kube-apiserver", ["system:masters"], [host, "10.96.0.1", *names])
        write_key(self._pki / "accounts.key")
        (self._api_port,) = free_ports(1, host)
        self.server = f"https://{host}:{self._api_port}"
        self._start_etcd()
        self._start_api_server()
        self._start_scheduler()
        self._start_controller_manager()

    def wait_for_accounts(self) -> None:
        """Returns when the controllers have made what a pod of the default namespace needs: until then it is refused."""
        self._wait_for("default service account", "/api/v1/namespaces/default/serviceaccounts/default")

    def stop(self) -> None:
        for name in reversed(list(self._processes)):
            self._processes.pop(name).stop()

    def restart_api_server(self, down_s: float = 0.0) -> None:
        """Kill the API server as a crash would, and have it back after ``down_s``, at the same address."""
        self._processes.pop("kube-apiserver").stop()
        time.sleep(down_s)
        self._start_api_server()

    def admit(self, path: Path, user: str, groups: Sequence[str] = ()) -> Path:
        """``path``.kubeconfig for somebody new, with certificate and key beside it."""
        self.authority.issue(path, user, groups)
        files = {"client-certificate": f"{path}.crt", "client-key": f"{path}.key"}
        return write_kubeconfig(path.with_suffix(".kubeconfig"), self.server, self.authority.file, user, files)

    def check(self) -> None:
        """Raises ControlPlaneError if one of the programs has ended by itself."""
        for name, process in list(self._processes.items()):
            if not process.running:
                raise ControlPlaneError(f"{name} ended with {process.wait()}: {last_line(self._log(name))}")

    def _start_etcd(self) -> None:
        own, peer = self._etcd, f"unix://{self._folder}/peer.sock"
        flags = {
            "name": "test",
            "data-dir": self._folder / "etcd",
            "unsafe-no-fsync": "true",  # no request waits for a disk that others use, too
            "listen-client-urls": own,
            "advertise-client-urls": own,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"test={peer}",
            "logger": "zap",
        }
        self._run("etcd", flags)

    def _start_api_server(self) -> None:
        own, account_key = self._pki / "apiserver", self._pki / "accounts.key"
        flags = {
            "bind-address": self._host,
            "secure-port": self._api_port,
            "etcd-servers": self._etcd,
            "tls-cert-file": f"{own}.crt",
            "tls-private-key-file": f"{own}.key",
            "client-ca-file": self.authority.file,
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "anonymous-auth": "false",
            "service-cluster-ip-range": SERVICES,
            "service-account-key-file": account_key,
            "service-account-signing-key-file": account_key,
            "service-account-issuer": "https://kubernetes.default.svc",
            "kubelet-client-certificate": f"{own}.crt",
            "kubelet-client-key": f"{own}.key",
            "kubelet-preferred-address-types": "InternalIP",
            "default-not-ready-toleration-seconds": _TOLERATION_S,
            "default-unreachable-toleration-seconds": _TOLERATION_S,
            "cert-dir": self._pki,
        }
        # The endpoint of the Service `kubernetes`, which may not be on loopback; there the nodes say where the server is.
        endpoint = {"endpoint-reconciler-type": "none"} if self._host == HOST else {"advertise-address": self._host}
        self._run("kube-apiserver", {**flags, **endpoint})
        self._wait_for("API server", "/readyz")

    def _start_scheduler(self) -> None:
        configuration = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(self._pki / "kube-scheduler.kubeconfig")},
            "leaderElection": {"leaderElect": False},
            # Who preempts others would otherwise wait up to 10 s after they have gone.
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 1,
        }
        path = self._folder / "scheduler.yaml"
        path.write_text(yaml.safe_dump(configuration))
        self._run_component("kube-scheduler", {"config": path})

    def _start_controller_manager(self) -> None:
        flags = {
            "kubeconfig": self._pki / "kube-controller-manager.kubeconfig",
            "leader-elect": "false",
            "use-service-account-credentials": "true",
            "service-account-private-key-file": self._pki / "accounts.key",
            "root-ca-file": self.authority.file,
            "node-monitor-period": "1s",
            "node-monitor-grace-period": f"{_NODE_GRACE_S}s",
            "node-eviction-rate": "10",
            # Otherwise pods of lost nodes stay when more than half of a small cluster's nodes, and three, are not ready.
            "unhealthy-zone-threshold": "1",
        }
        self._run_component("kube-controller-manager", flags)

    def _run_component(self, name: str, flags: dict[str, object]) -> None:
        kubeconfig = self.admit(self._pki / name, f"system:{name}")
        own = {"bind-address": HOST, "secure-port": free_ports(1)[0], "cert-dir": self._pki}
        asks = {"authentication-kubeconfig": kubeconfig, "authorization-kubeconfig": kubeconfig}
        self._run(name, {**flags, **own, **asks})

    def _run(self, name: str, flags: dict[str, object]) -> None:
        command = [str(self._programs / name), *(f"--{flag}={value}" for flag, value in flags.items())]
        self._processes[name] = Leashed.start(command, self._log(name), folder=self._folder)

    def _wait_for(self, what: str, path: str) -> None:
        """Until the API server answers a request for ``path``, and not with an error."""
        context = ssl.create_default_context(cafile=self.authority.file)
        context.load_cert_chain(self._pki / "apiserver.crt", self._pki / "apiserver.key")

        def answers() -> bool:
            try:
                with urllib.request.urlopen(f"{self.server}{path}", timeout=5, context=context):
                    return True
            except OSError:
                self.check()
                return False

        wait_for(answers, lambda: f"{what}: not ready: {last_line(self._log('kube-apiserver'))}", _READY_WITHIN_S)

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"


def wait_for(done: Callable[[], bool], otherwise: Callable[[], str], seconds: float, poll: float = _POLL_S) -> None:
    """
    Raises:
        ControlPlaneError: it is not done in time.
    """
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise ControlPlaneError(f"{otherwise()}, after {seconds:g} s")
        time.sleep(poll)


def last_line(log: Path) -> str:
    return f"{(log.read_text(errors='replace').splitlines() or ['no output'])[-1]} (log: {log})"


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Ports that nobody listens on, below those that the kernel gives to outgoing connections: they stay free."""
    found: list[int] = []
    # Not by the generator of all: two test processes in which something has seeded it would take the same.
    for port in random.SystemRandom().sample(range(20000, 32000), 2000):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise ControlPlaneError("no free ports from 20000 to 32000")
