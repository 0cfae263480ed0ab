"""The node itself: its registration, its heartbeat, and its list of pods."""

from __future__ import annotations

import contextlib
import itertools
import platform
import random
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from elasticdl.common.backoff import Backoff
from elasticdl.job.quantities import GPU
from elasticdl.kube import client
from tests.cluster.api import Api, Json
from tests.cluster.node.pod import HostOfPods, Pod
from tests.cluster.node.server import PORT, bind
from tests.cluster.node.services import Services
from tests.cluster.node.status import Reporter, timestamp
from tests.cluster.settings import ProcessNodeSettings

_RETRY_S = 0.2
_LONGEST_RETRY_S = 1.0
_HEARTBEAT_S = 2.0
_PODS = "/api/v1/pods"
_ROOM = {"cpu": "64", "memory": "256Gi", "pods": "500", "ephemeral-storage": "100Gi"}


class PodsOfNode(client.Source):
    """What `elasticdl.kube.client.Watch` follows."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._mine = f"spec.nodeName={node}"

    def list(self) -> Json:
        return self._api.ask("GET", _PODS, fieldSelector=self._mine)

    def watch(self, version: str) -> client.Changes:
        how = {"watch": True, "allow_watch_bookmarks": True, "timeout_seconds": client.WATCH_SECONDS}
        query = {"field_selector": self._mine, "resource_version": version, **how}
        timeout = (client.ANSWER_SECONDS[0], client.SILENCE_SECONDS)
        return client.Changes(self._api.open("GET", _PODS, "watch pods", query, timeout=timeout), self._api)


class Node:
    """Runs pods until its process is killed."""

    def __init__(self, settings: ProcessNodeSettings) -> None:
        self._settings = settings
        self._api = Api(settings.own / "kubelet.kubeconfig")
        self._lock = threading.Lock()
        self._pods: dict[str, Pod] = {}

    def run(self) -> None:
        server, network = self._bind()
        address = f"127.{network}.0.1"
        reporter = Reporter(self._api)
        for work in (reporter.run, server.serve_forever, partial(self._beat, address)):
            threading.Thread(target=work, daemon=True).start()
        host = self._host(address, network, reporter)

        def listed(manifests: Sequence[Json]) -> None:
            for uid in self._pods.keys() - {each["metadata"]["uid"] for each in manifests}:
                self._forget(uid)
            for each in manifests:
                self._see(each, host)

        def changed(kind: str, manifest: Json) -> None:
            self._forget(manifest["metadata"]["uid"]) if kind == "DELETED" else self._see(manifest, host)

        backoff = Backoff(first=_RETRY_S, longest=_LONGEST_RETRY_S)
        client.Watch(PodsOfNode(self._api, self._settings.name), listed, changed, backoff).run()

    def _bind(self) -> tuple[ThreadingHTTPServer, int]:
        """A server for the logs, and the second number of this node's addresses, which nobody else has while it runs."""
        for network in random.SystemRandom().sample(range(1, 255), 254):
            with contextlib.suppress(OSError):
                return bind(f"127.{network}.0.1", self._named, self._settings), network
        raise OSError(f"port {PORT} is taken on all of 127.1.0.1 to 127.254.0.1")

    def _host(self, address: str, network: int, reporter: Reporter) -> HostOfPods:
        settings, folder = self._settings, self._settings.own
        (folder / "pods").mkdir(parents=True, exist_ok=True)
        url = urlsplit(settings.server)
        service = {"KUBERNETES_SERVICE_HOST": str(url.hostname), "KUBERNETES_SERVICE_PORT": str(url.port)}
        numbers = itertools.count(256)
        return HostOfPods(
            address=address,
            pods=folder / "pods",
            logs=Path(settings.logs, "pods"),
            api=self._api,
            reporter=reporter,
            environment={**settings.environment, **service},
            # From 127.n.1.0 on, each once: an old peer's address never belongs to a new pod.
            new_address=lambda: "127.{}.{}.{}".format(network, *divmod(next(numbers), 256)),
            services=Services(Api(folder / "services.kubeconfig"), f"127.{network}"),
        )

    def _beat(self, address: str) -> None:
        """Say that the node is there, also to those who thought it lost; register it where it is not known, also anew."""
        name = self._settings.name
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        while True:
            pause = _RETRY_S
            try:
                self._post_status(address)
                pause = _HEARTBEAT_S
            except client.NotThereError:
                with contextlib.suppress(client.ApiError):
                    self._api.ask("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
            except client.ApiError as error:
                print(f"{timestamp()} heartbeat: {error}", file=sys.stderr, flush=True)
            time.sleep(pause)

    def _post_status(self, address: str) -> None:
        settings = self._settings
        room = {**_ROOM, GPU: str(settings.gpus)}
        info = {"kubeletVersion": "process-node", "operatingSystem": "linux", "architecture": platform.machine()}
        healthy = {"Ready": "True", "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False"}
        times = dict.fromkeys(("lastHeartbeatTime", "lastTransitionTime"), timestamp())
        each = {"reason": "ProcessNode", **times}
        conditions = [{"type": name, "status": value, **each} for name, value in healthy.items()]
        addresses = [{"type": "InternalIP", "address": address}, {"type": "Hostname", "address": settings.name}]
        status = {"capacity": room, "allocatable": room, "conditions": conditions, "addresses": addresses}
        status |= {"nodeInfo": info, "daemonEndpoints": {"kubeletEndpoint": {"Port": PORT}}}
        self._api.ask("PATCH", f"/api/v1/nodes/{settings.name}/status", {"status": status})

    def _see(self, manifest: Json, host: HostOfPods) -> None:
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


if __name__ == "__main__":
    Node(ProcessNodeSettings.told()).run()
