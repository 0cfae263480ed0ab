"""Nodes that only report: they say that pods run, and run nothing but the agent's and the worker's side of their streams.

    python -m benchmarks.hollow_nodes KUBECONFIG NAMESPACE JOB NODES

A stand-in for NODES kubelets and the worker processes of one job, in one process: it registers the nodes, sees by a watch
which pods are bound to them, reports these as running, and speaks with the job's master as the agent of each and as the worker that the
master orders there. It reports their end when they are deleted, when the master tells them to leave, or when somebody else said that they have ended. The nodes
have a taint, so that nothing else comes to them, and go with the process's end (SIGTERM).
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

import grpc
from kubernetes import client, config

from benchmarks.clusters import GPU
from benchmarks.scale_host import CHANNELS, Worker
from elasticdl.common.backoff import Backoff
from elasticdl.common.channel import CLIENT_OPTIONS
from elasticdl.common.credentials import Identity
from elasticdl.kube.client import Client
from elasticdl.kube.manifests.names import CONTAINER, MASTER_PORT, Role, selector, tls_name
from elasticdl.kube.object_watch import Watch
from elasticdl.places.pods.worker_pods import WorkerPodApi, number_of
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

LABEL = "benchmark.elasticdl.org/hollow"
NODES = "ELASTICDL_BENCHMARK_NODES"  # the variable that tells a submission the value of that label
PODS_PER_NODE = 110  # what a kubelet takes by default
BEAT_SECONDS = 3.0
THREADS = 8
MASTER_SECONDS = 60.0

Pod = Mapping[str, Any]


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Nodes:
    """Node objects that stay ready for as long as somebody calls `beat`."""

    def __init__(self, core: Any, group: str, count: int) -> None:
        self._core = core
        self._group = group
        self._names = [f"{group}-{number}" for number in range(count)]

    def register(self) -> None:
        for name in self._names:
            taint = {"key": LABEL, "value": self._group, "effect": "NoSchedule"}
            labels = {LABEL: self._group, "kubernetes.io/hostname": name}
            self._core.create_node({"metadata": {"name": name, "labels": labels}, "spec": {"taints": [taint]}})
        self.beat()

    def beat(self) -> None:
        room = {"cpu": "1000", "memory": "1000Gi", "pods": str(PODS_PER_NODE), GPU: str(PODS_PER_NODE)}
        for name in self._names:
            ready = {"type": "Ready", "status": "True", "reason": "Hollow", "lastHeartbeatTime": now()}
            status = {"capacity": room, "allocatable": room, "conditions": [ready]}
            with suppress(client.ApiException):  # the next beat comes soon enough
                self._core.patch_node_status(name, {"status": status})

    def remove(self) -> None:
        for name in self._names:
            with suppress(client.ApiException):
                self._core.delete_node(name)


class Kubelet:
    """Reports what becomes of the pods that are bound; `start` and `end` are told of them, by their numbers.

    Its methods are called in the watch's thread; requests are made in threads of its own.
    """

    def __init__(
        self, core: client.CoreV1Api, namespace: str, start: Callable[[int, Pod], None], end: Callable[[int], None]
    ) -> None:
        self._core = core
        self._namespace = namespace
        self._start = start
        self._end = end
        self._threads = ThreadPoolExecutor(THREADS)
        self._addresses = (f"10.{a}.{b}.{c}" for a, b, c in itertools.product(range(1, 255), repeat=3))
        self._running: dict[int, str] = {}  # names of pods
        self._ending: set[int] = set()

    # ---- the watch's receiver ----

    def listed(self, items: tuple[Pod, ...]) -> None:
        for item in items:
            self.changed("MODIFIED", item)

    def changed(self, kind: str, pod: Pod) -> None:
        number, phase = number_of(pod), pod.get("status", {}).get("phase")
        if kind == "DELETED" or phase in ("Succeeded", "Failed"):
            self._running.pop(number, None)
            self._end(number)
        if kind == "DELETED" or not pod["spec"].get("nodeName"):
            return
        if pod["metadata"].get("deletionTimestamp"):
            if number not in self._ending:
                self._ending.add(number)
                self._end(number)
                self._threads.submit(self._remove, pod)
        elif number not in self._running and phase == "Pending":
            self._running[number] = pod["metadata"]["name"]
            self._threads.submit(self._run, number, pod)

    def left(self, number: int) -> None:
        """The agent has ended by itself, as it was told to."""
        if name := self._running.get(number):
            self._threads.submit(self._report, name, "Succeeded", {"terminated": {"exitCode": 0, "finishedAt": now()}})

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    # ---- in its threads ----

    def _run(self, number: int, pod: Pod) -> None:
        self._report(pod["metadata"]["name"], "Running", {"running": {"startedAt": now()}}, next(self._addresses))
        self._start(number, pod)

    def _remove(self, pod: Pod) -> None:
        name = pod["metadata"]["name"]
        self._report(name, "Failed", {"terminated": {"exitCode": 137, "finishedAt": now()}})
        with suppress(client.ApiException):
            self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0, _preload_content=False)

    def _report(self, name: str, phase: str, state: Mapping[str, Any], address: str = "") -> None:
        container = {"name": CONTAINER, "image": "hollow", "imageID": "", "restartCount": 0, "state": state}
        container["ready"] = phase == "Running"
        ready = {"type": "Ready", "status": str(phase == "Running"), "lastTransitionTime": now()}
        status = {"phase": phase, "containerStatuses": [container], "conditions": [ready]}
        if address:
            status |= {"podIP": address, "podIPs": [{"ip": address}], "startTime": now()}
        with suppress(client.ApiException):  # it was deleted meanwhile
            self._core.patch_namespaced_pod_status(name, self._namespace, {"status": status}, _preload_content=False)


class Agents:
    """The simulated agents and workers, on one event loop."""

    def __init__(self, core: client.CoreV1Api, namespace: str, job: str) -> None:
        self._core = core
        self._namespace = namespace
        self._job = job
        self._agents: dict[int, asyncio.Task[None]] = {}
        self._stubs: Iterator[pb_grpc.MasterStub] | None = None
        self._loop = asyncio.get_running_loop()
        self._opening = asyncio.Lock()
        self.left: Callable[[int], None] = lambda number: None

    def start(self, number: int, pod: Pod) -> None:
        """From any thread."""
        hello = pb.AgentHello(place=pod["metadata"]["name"], node=pod["spec"]["nodeName"], host="127.0.0.1")
        self._loop.call_soon_threadsafe(self._start, number, hello)

    def end(self, number: int) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._end, number)

    async def close(self) -> None:
        for task in self._agents.values():
            task.cancel()
        await asyncio.gather(*self._agents.values(), return_exceptions=True)

    def _start(self, number: int, hello: pb.AgentHello) -> None:
        task = self._agents[number] = self._loop.create_task(self._run(number, hello))
        task.add_done_callback(_tell_failure)

    def _end(self, number: int) -> None:
        if task := self._agents.pop(number, None):
            task.cancel()

    async def _run(self, number: int, hello: pb.AgentHello) -> None:
        async with self._opening:
            if self._stubs is None:
                self._stubs = itertools.cycle(self._connect(*await asyncio.to_thread(self._master)))
        with suppress(grpc.aio.AioRpcError):  # the job is over
            await Agent(hello, next(self._stubs)).run()
            self.left(number)

    def _connect(self, address: str, files: Mapping[str, bytes]) -> list[pb_grpc.MasterStub]:
        tls = grpc.ssl_channel_credentials(files["ca.crt"], files["tls.key"], files["tls.crt"])
        name = ("grpc.ssl_target_name_override", Identity(Role.MASTER, self._job).dns_name)
        options = [*CLIENT_OPTIONS, name, ("grpc.use_local_subchannel_pool", 1)]
        return [pb_grpc.MasterStub(grpc.aio.secure_channel(address, tls, options)) for _ in range(CHANNELS)]

    def _master(self) -> tuple[str, Mapping[str, bytes]]:
        """Its address, and the certificate with which a worker calls it."""
        secret: Any = self._core.read_namespaced_secret(tls_name(self._job, Role.WORKER), self._namespace)
        files = {name: base64.b64decode(content) for name, content in secret.data.items()}
        deadline = time.monotonic() + MASTER_SECONDS
        while time.monotonic() < deadline:
            pods: Any = self._core.list_namespaced_pod(self._namespace, label_selector=selector(self._job, Role.MASTER))
            for pod in pods.items:
                if pod.status.phase == "Running":
                    return f"{pod.status.pod_ip}:{MASTER_PORT}", files
        raise TimeoutError(f"no master of {self._job} runs, after {MASTER_SECONDS:g} s")


class Agent:
    """Starts workers as the master orders, until it is told to leave."""

    def __init__(self, hello: pb.AgentHello, stub: pb_grpc.MasterStub) -> None:
        self._stub = stub
        self._outbox: asyncio.Queue[pb.AgentMessage] = asyncio.Queue()
        self._outbox.put_nowait(pb.AgentMessage(hello=hello))
        self._workers: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            async for order in self._stub.Attend(self._messages()):
                match order.WhichOneof("body"):
                    case "start":
                        worker_id = order.start.worker_id
                        self._workers[worker_id] = asyncio.create_task(self._live(worker_id))
                    case "end":
                        if worker := self._workers.get(order.end.worker_id):
                            worker.cancel()
                    case "leave":
                        return
        finally:
            for worker in self._workers.values():
                worker.cancel()

    async def _messages(self) -> AsyncIterator[pb.AgentMessage]:
        while True:
            yield await self._outbox.get()

    async def _live(self, worker_id: int) -> None:
        self._outbox.put_nowait(pb.AgentMessage(started=pb.Started(worker_id=worker_id, pid=1)))
        code = -int(signal.SIGKILL)
        try:
            with suppress(grpc.aio.AioRpcError):
                await Worker(worker_id, self._stub, (), lambda version, size: None).run()
                code = 0
        finally:
            self._outbox.put_nowait(pb.AgentMessage(ended=pb.Ended(worker_id=worker_id, code=code)))


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        print(f"a simulated agent failed: {error!r}", file=sys.stderr, flush=True)


async def serve(kubeconfig: str, namespace: str, job: str, count: int) -> None:
    """Until SIGTERM."""
    api = config.new_client_from_config(kubeconfig)
    core, stopped = client.CoreV1Api(api), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    nodes, agents = Nodes(core, namespace, count), Agents(core, namespace, job)
    kubelet = Kubelet(core, namespace, agents.start, agents.end)
    agents.left = kubelet.left
    watch = Watch(
        WorkerPodApi(Client(api, namespace), job).pods,
        kubelet.listed,
        kubelet.changed,
        Backoff(random.Random()),
    )
    with _registered(nodes):
        watch.start()
        while not stopped.is_set():
            await asyncio.to_thread(nodes.beat)
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await stopped.wait()
        watch.stop()
        await asyncio.to_thread(watch.join)
        await agents.close()
        await asyncio.to_thread(kubelet.close)


@contextmanager
def _registered(nodes: Nodes) -> Iterator[None]:
    try:
        nodes.register()
        yield
    finally:
        nodes.remove()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
