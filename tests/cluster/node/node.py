"""The node itself: its registration, its heartbeat, and its list of pods."""

from __future__ import annotations

import itertools
import platform
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from elasticdl.common.backoff import Backoff
from elasticdl.kube.client import ABSENT, CONFLICT, ApiError, Watch
from tests.cluster.node.api import Api, Json, PodsOfNode
from tests.cluster.node.logs import PORT, bind
from tests.cluster.node.pod import GPU, Devices, Host, Pod
from tests.cluster.node.services import Services
from tests.cluster.node.status import Reporter, timestamp
from tests.cluster.pki import Pair

_RETRY_S = 0.2
_LONGEST_RETRY_S = 1.0
_HEARTBEAT_S = 2.0
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_ROOM = {"cpu": "64", "memory": "256Gi", "pods": "500", "ephemeral-storage": "100Gi"}
_FACTS = ("machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "kubeletVersion", "kubeProxyVersion")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One node of a cluster; paths are strings because this travels as JSON."""

    name: str
    server: str
    authority: str
    certificate: str
    key: str
    # Of somebody who may see all Services and their pods.
    services_certificate: str
    services_key: str
    folder: str
    logs: str
    gpus: int
    # What every container's image would set.
    environment: dict[str, str] = field(default_factory=dict)


class Node:
    """Runs pods until its process is killed."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._identity = Pair(Path(settings.certificate), Path(settings.key))
        self._api = Api(settings.server, settings.authority, self._identity)
        self._lock = threading.Lock()
        self._pods: dict[str, Pod] = {}

    def run(self) -> None:
        server, network = self._bind()
        address = f"127.{network}.0.1"
        reporter = Reporter(self._api, self._settings.name)
        threads: list[tuple[Callable[..., None], tuple[str, ...]]]
        threads = [(reporter.run, ()), (server.serve_forever, ()), (self._beat, (address,))]
        self._insist(lambda: self._register(address))
        for target, arguments in threads:
            threading.Thread(target=target, args=arguments, daemon=True).start()
        host = self._host(address, network, reporter)

        def listed(manifests: Sequence[Json]) -> None:
            for uid in self._pods.keys() - {each["metadata"]["uid"] for each in manifests}:
                self._forget(uid)
            for each in manifests:
                self._see(each, host)

        def changed(kind: str, manifest: Json) -> None:
            self._forget(manifest["metadata"]["uid"]) if kind == "DELETED" else self._see(manifest, host)

        backoff = Backoff(first=_RETRY_S, longest=_LONGEST_RETRY_S)
        Watch(PodsOfNode(self._api, self._settings.name), listed, changed, backoff).run()

    def _bind(self) -> tuple[ThreadingHTTPServer, int]:
        """A server for the logs, and the second number of this node's addresses, which nobody else has while it runs."""
        for network in random.SystemRandom().sample(range(1, 255), 254):
            try:
                address = f"127.{network}.0.1"
                return bind(
                    address, self._find_log, self._find_address, self._identity, self._settings.authority
                ), network
            except OSError:
                continue
        raise OSError(f"port {PORT} is taken on all of 127.1.0.1 to 127.254.0.1")

    def _host(self, address: str, network: int, reporter: Reporter) -> Host:
        settings, folder = self._settings, Path(self._settings.folder)
        (folder / "pods").mkdir(parents=True, exist_ok=True)
        url = urlsplit(settings.server)
        service = {"KUBERNETES_SERVICE_HOST": str(url.hostname), "KUBERNETES_SERVICE_PORT": str(url.port)}
        numbers = itertools.count(256)
        may_look = Pair(Path(settings.services_certificate), Path(settings.services_key))
        return Host(
            address=address,
            pods=folder / "pods",
            logs=Path(settings.logs),
            api=self._api,
            reporter=reporter,
            devices=Devices(settings.gpus),
            environment={**settings.environment, **service},
            # From 127.n.1.0 on, each once: an old peer's address never belongs to a new pod.
            new_address=lambda: "127.{}.{}.{}".format(network, *divmod(next(numbers), 256)),
            services=Services(Api(settings.server, settings.authority, may_look), f"127.{network}"),
        )

    def _register(self, address: str) -> None:
        name = self._settings.name
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        self._create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        self._post_status(address)
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": timestamp(micro=True)}
        self._create(_LEASES, {"metadata": {"name": name}, "spec": spec})

    def _create(self, path: str, body: Json) -> None:
        try:
            self._api.ask("POST", path, body)
        except ApiError as error:
            if error.status != CONFLICT:  # it was here before
                raise

    def _beat(self, address: str) -> None:
        """Renew the lease; the status too, since a node that was thought lost has to say that it is there."""
        while True:
            started = time.monotonic()
            try:
                renewed = {"spec": {"renewTime": timestamp(micro=True)}}
                self._api.ask("PATCH", f"{_LEASES}/{self._settings.name}", renewed)
                self._post_status(address)
            except ApiError as error:
                _say(f"heartbeat: {error}")
                if error.status == ABSENT:  # somebody deleted the node, as `kubectl delete node` does
                    self._insist(lambda: self._register(address))
            time.sleep(max(_RETRY_S, started + _HEARTBEAT_S - time.monotonic()))

    def _post_status(self, address: str) -> None:
        settings = self._settings
        room = {**_ROOM, GPU: str(settings.gpus)}
        info = {**dict.fromkeys(_FACTS, "process-node"), "containerRuntimeVersion": "process://1"}
        info |= {"operatingSystem": "linux", "architecture": platform.machine()}
        healthy = {"Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False"}
        times = dict.fromkeys(("lastHeartbeatTime", "lastTransitionTime"), timestamp())
        conditions = [
            {"type": name, "status": value, "reason": "ProcessNode", **times} for name, value in healthy.items()
        ]
        addresses = [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": settings.name}]
        status = {"capacity": room, "allocatable": room, "conditions": conditions, "addresses": addresses}
        status |= {"nodeInfo": info, "daemonEndpoints": {"kubeletEndpoint": {"Port": PORT}}}
        self._api.ask("PATCH", f"/api/v1/nodes/{settings.name}/status", {"status": status})

    def _see(self, manifest: Json, host: Host) -> None:
        uid = manifest["metadata"]["uid"]
        if known := self._pods.get(uid):
            known.changed(manifest)
            return
        pod = Pod(manifest, host)
        with self._lock:
            self._pods[uid] = pod
        pod.start()

    def _forget(self, uid: str) -> None:
        with self._lock:
            pod = self._pods.pop(uid, None)
        if pod:
            pod.vanished()

    def _named(self, namespace: str, name: str) -> Pod | None:
        with self._lock:
            found = [pod for pod in self._pods.values() if (pod.ref.namespace, pod.ref.name) == (namespace, name)]
        return found[-1] if found else None

    def _find_log(self, namespace: str, name: str, container: str) -> tuple[Path, Callable[[], bool]] | None:
        pod = self._named(namespace, name)
        found = next((each for each in pod.containers if each.name == container), None) if pod else None
        if found is None:
            return None
        return found.log, lambda: found.process is not None

    def _find_address(self, namespace: str, name: str) -> str | None:
        pod = self._named(namespace, name)
        return pod.address if pod else None

    def _insist(self, attempt: Callable[[], None]) -> None:
        while True:
            try:
                return attempt()
            except ApiError as error:
                _say(f"registration: {error}")
                time.sleep(_RETRY_S)


def _say(line: str) -> None:
    print(f"{timestamp()} {line}", file=sys.stderr, flush=True)
