"""The node itself: its registration, its heartbeat, and its list of pods."""

from __future__ import annotations

import itertools
import platform
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from tests.cluster.node.api import Api, ApiError, Json, Unreachable
from tests.cluster.node.container import Container
from tests.cluster.node.devices import Devices
from tests.cluster.node.logs import PORT, Find, LogFile, bind, serve
from tests.cluster.node.pod import GPU, Host, Pod
from tests.cluster.node.reporter import Reporter, timestamp
from tests.cluster.node.services import Services
from tests.cluster.pki import Pair

_RETRY_S = 0.2
_PODS = "/api/v1/pods"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_BEATS_PER_STATUS = 2


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
    cpus: int = 64
    memory: str = "256Gi"
    heartbeat_s: float = 2.0
    restart_backoff_s: float = 1.0
    labels: dict[str, str] = field(default_factory=dict)
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
        self._version: str | None = None

    def run(self) -> None:
        server, network = self._bind()
        address = f"127.{network}.0.1"
        reporter = Reporter(self._api, {"component": "kubelet", "host": self._settings.name})
        reporter.start()
        serve(server)
        self._insist(lambda: self._register(address))
        threading.Thread(target=self._beat, args=(address,), name="heartbeat", daemon=True).start()
        host = self._host(address, network, reporter)
        while True:
            try:
                self._follow(host)
            except ApiError as error:
                self._say(f"pods: {error}")
                if error.status == 410:
                    self._version = None
                time.sleep(_RETRY_S)
            except Unreachable as error:
                self._say(f"pods: {error}")
                time.sleep(_RETRY_S)

    def _bind(self) -> tuple[ThreadingHTTPServer, int]:
        """A server for the logs, and the second number of this node's addresses, which nobody else has while it runs."""
        find = Find(self._find_log, self._find_address)
        for network in random.SystemRandom().sample(range(1, 255), 254):
            try:
                return bind(f"127.{network}.0.1", find, self._identity, self._settings.authority), network
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
            restart_backoff=settings.restart_backoff_s,
            # From 127.n.1.0 on, each once: an old peer's address never belongs to a new pod.
            new_address=lambda: "127.{}.{}.{}".format(network, *divmod(next(numbers), 256)),
            services=Services(Api(settings.server, settings.authority, may_look), f"127.{network}"),
        )

    def _register(self, address: str) -> None:
        name = self._settings.name
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **self._settings.labels}
        self._create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        self._post_status(address)
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": timestamp(micro=True)}
        self._create(_LEASES, {"metadata": {"name": name}, "spec": spec})

    def _create(self, path: str, body: Json) -> None:
        try:
            self._api.create(path, body)
        except ApiError as error:
            if error.status != 409:  # it was here before
                raise

    def _beat(self, address: str) -> None:
        """Renew the lease; the status too, since a node that was thought lost has to say that it is there."""
        for count in itertools.count():
            started = time.monotonic()
            try:
                self._api.patch(f"{_LEASES}/{self._settings.name}", {"spec": {"renewTime": timestamp(micro=True)}})
                if count % _BEATS_PER_STATUS == 0:
                    self._post_status(address)
            except ApiError as error:
                self._say(f"heartbeat: {error}")
                if error.status == 404:  # somebody deleted the node, as `kubectl delete node` does
                    self._insist(lambda: self._register(address))
            except Unreachable as error:
                self._say(f"heartbeat: {error}")
            time.sleep(max(_RETRY_S, started + self._settings.heartbeat_s - time.monotonic()))

    def _post_status(self, address: str) -> None:
        settings = self._settings
        room = {"cpu": str(settings.cpus), "memory": settings.memory, "pods": "500", "ephemeral-storage": "100Gi"}
        room[GPU] = str(settings.gpus)
        facts = ["machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "kubeletVersion", "kubeProxyVersion"]
        info = {**dict.fromkeys(facts, "process-node"), "containerRuntimeVersion": "process://1"}
        info |= {"operatingSystem": "linux", "architecture": platform.machine()}
        now = timestamp()
        healthy = {"Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False"}
        conditions = [
            {
                "type": name,
                "status": value,
                "reason": "ProcessNode",
                "lastHeartbeatTime": now,
                "lastTransitionTime": now,
            }
            for name, value in healthy.items()
        ]
        addresses = [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": settings.name}]
        status = {"capacity": room, "allocatable": room, "conditions": conditions, "addresses": addresses}
        status |= {"nodeInfo": info, "daemonEndpoints": {"kubeletEndpoint": {"Port": PORT}}}
        self._api.patch(f"/api/v1/nodes/{settings.name}/status", {"status": status})

    def _follow(self, host: Host) -> None:
        """List if the version to go on from is not known, and watch from there until the connection ends."""
        mine = f"spec.nodeName={self._settings.name}"
        if self._version is None:
            found = self._api.get(_PODS, fieldSelector=mine)
            present = {pod["metadata"]["uid"] for pod in found["items"]}
            for uid in self._pods.keys() - present:
                self._forget(uid)
            for pod in found["items"]:
                self._see(pod, host)
            self._version = found["metadata"]["resourceVersion"]
        for event in self._api.watch(_PODS, self._version, fieldSelector=mine):
            if event["type"] == "DELETED":
                self._forget(event["object"]["metadata"]["uid"])
            elif event["type"] != "BOOKMARK":
                self._see(event["object"], host)
            self._version = event["object"]["metadata"]["resourceVersion"]

    def _see(self, manifest: Json, host: Host) -> None:
        uid = manifest["metadata"]["uid"]
        known = self._pods.get(uid)
        if known:
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

    def _find_log(self, namespace: str, name: str, container: str, previous: bool) -> LogFile | None:
        with self._lock:
            pods = [pod for pod in self._pods.values() if (pod.ref.namespace, pod.ref.name) == (namespace, name)]
        for each in (each for pod in pods for each in pod.containers if each.view.name == container):
            return LogFile(each.log(previous=previous), growing=partial(_is_writing, each, previous))
        return None

    def _find_address(self, namespace: str, name: str) -> str | None:
        with self._lock:
            found = [pod for pod in self._pods.values() if (pod.ref.namespace, pod.ref.name) == (namespace, name)]
        return found[-1].address if found else None

    def _insist(self, attempt: Callable[[], None]) -> None:
        while True:
            try:
                return attempt()
            except (ApiError, Unreachable) as error:
                self._say(f"registration: {error}")
                time.sleep(_RETRY_S)

    def _say(self, line: str) -> None:
        print(f"{timestamp()} {line}", file=sys.stderr, flush=True)


def _is_writing(container: Container, previous: bool) -> bool:
    return not previous and container.process is not None
