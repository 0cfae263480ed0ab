"""Nodes that only report: they say that pods run, and run nothing but the agent's and the worker's side of their streams.

    python -m benchmarks.hollow_nodes NAMESPACE JOB NODES [CONTEXT]

A stand-in for NODES kubelets and the worker processes of one job, in one process: it registers the nodes, sees by a watch
which pods are bound to them, reports these as running, and speaks with the job's master as the agent of each and as the worker
that the master orders there. It reports their end when they are deleted, when the master tells them to leave, or when somebody
else said that they have ended. The nodes have a taint, so that nothing else comes to them, and go with the process's end (SIGTERM).
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import grpc
from kubernetes import client, config

from benchmarks.counted_master import LABEL
from benchmarks.experiments.pods import Pod, Pods, PodWatch, is_over
from benchmarks.simulated import CHANNELS, Worker
from elasticdl.common.channel import CLIENT_OPTIONS
from elasticdl.common.credentials import Identity
from elasticdl.job.quantities import GPU
from elasticdl.kube.manifests.names import CONTAINER, MASTER_PORT, Role, selector, tls_name
from elasticdl.places.pods.worker_pods import number_of
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

PODS_PER_NODE = 110  # what a kubelet takes by default
BEAT_SECONDS = 3.0
THREADS = 8


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Nodes(PodWatch):
    """Nodes that report what becomes of the pods that are bound to them; in the agents' loop each pod is an agent.

    Its watch has a thread, and requests are made in others.
    """

    def __init__(self, core: client.CoreV1Api, namespace: str, job: str, count: int) -> None:
        super().__init__(core, namespace)
        self._core: Any = core
        self._namespace = namespace
        self._names = [f"{namespace}-{number}" for number in range(count)]
        self._agents = Agents(core, namespace, job, self._left)
        self._threads = ThreadPoolExecutor(THREADS)
        self._addresses = (f"10.{a}.{b}.{c}" for a, b, c in itertools.product(range(1, 255), repeat=3))
        self._running: dict[str, int] = {}  # by the names of pods: their numbers
        self._ending: set[str] = set()

    def register(self) -> None:
        for name in self._names:
            taint = {"key": LABEL, "value": self._namespace, "effect": "NoSchedule"}
            labels = {LABEL: self._namespace, "kubernetes.io/hostname": name}
            self._core.create_node({"metadata": {"name": name, "labels": labels}, "spec": {"taints": [taint]}})
        self.beat()

    def beat(self) -> None:
        """The nodes are ready for as long as somebody calls this."""
        room = {"cpu": "1000", "memory": "1000Gi", "pods": str(PODS_PER_NODE), GPU: str(PODS_PER_NODE)}
        for name in self._names:
            ready = {"type": "Ready", "status": "True", "reason": "Hollow", "lastHeartbeatTime": now()}
            status = {"capacity": room, "allocatable": room, "conditions": [ready]}
            with suppress(client.ApiException):  # the next beat comes soon enough
                self._core.patch_node_status(name, {"status": status})

    def remove(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for name in self._names:
            with suppress(client.ApiException):
                self._core.delete_node(name)

    async def close(self) -> None:
        await self._agents.close()

    def see(self, pods: Pods) -> None:
        for name in [name for name in self._running if name not in pods]:
            self._end(name)
        for name, pod in pods.items():
            if pod["spec"].get("nodeName") not in self._names:
                continue
            if pod["metadata"].get("deletionTimestamp"):
                if name not in self._ending:
                    self._ending.add(name)
                    self._end(name)
                    self._threads.submit(self._delete, name)
            elif is_over(pod):
                self._end(name)
            elif name not in self._running and pod["status"].get("phase") == "Pending":
                self._running[name] = number_of(pod)
                self._threads.submit(self._run, name, pod)

    def _end(self, name: str) -> None:
        if (number := self._running.pop(name, None)) is not None:
            self._agents.end(number)

    def _left(self, name: str) -> None:
        """The agent has ended by itself, as it was told to."""
        self._threads.submit(self._report, name, "Succeeded", {"terminated": {"exitCode": 0, "finishedAt": now()}})

    # ---- in other threads ----

    def _run(self, name: str, pod: Pod) -> None:
        self._report(name, "Running", {"running": {"startedAt": now()}}, next(self._addresses))
        self._agents.start(number_of(pod), name, pod["spec"]["nodeName"])

    def _delete(self, name: str) -> None:
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

    def __init__(self, core: client.CoreV1Api, namespace: str, job: str, left: Callable[[str], None]) -> None:
        """``left`` is told the pod of an agent that has ended by itself."""
        self._core: Any = core
        self._namespace = namespace
        self._job = job
        self._left = left
        self._agents: dict[int, asyncio.Task[None]] = {}
        self._stubs: Iterator[pb_grpc.MasterStub] | None = None
        self._loop = asyncio.get_running_loop()
        self._opening = asyncio.Lock()

    def start(self, number: int, pod: str, node: str) -> None:
        """From any thread."""
        hello = pb.AgentHello(place=pod, node=node, host="127.0.0.1")
        self._loop.call_soon_threadsafe(self._start, number, hello)

    def end(self, number: int) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._end, number)

    async def close(self) -> None:
        for task in self._agents.values():
            task.cancel()
        await asyncio.gather(*self._agents.values(), return_exceptions=True)

    def _start(self, number: int, hello: pb.AgentHello) -> None:
        task = self._agents[number] = self._loop.create_task(self._run(hello))
        task.add_done_callback(_tell_failure)

    def _end(self, number: int) -> None:
        if task := self._agents.pop(number, None):
            task.cancel()

    async def _run(self, hello: pb.AgentHello) -> None:
        async with self._opening:
            if self._stubs is None:
                self._stubs = itertools.cycle(self._connect(*await asyncio.to_thread(self._master)))
        with suppress(grpc.aio.AioRpcError):  # the job is over
            await Agent(hello, next(self._stubs)).run()
            self._left(hello.place)

    def _connect(self, address: str, files: Mapping[str, bytes]) -> list[pb_grpc.MasterStub]:
        tls = grpc.ssl_channel_credentials(files["ca.crt"], files["tls.key"], files["tls.crt"])
        name = ("grpc.ssl_target_name_override", Identity(Role.MASTER, self._job).dns_name)
        options = [*CLIENT_OPTIONS, name, ("grpc.use_local_subchannel_pool", 1)]
        return [pb_grpc.MasterStub(grpc.aio.secure_channel(address, tls, options)) for _ in range(CHANNELS)]

    def _master(self) -> tuple[str, Mapping[str, bytes]]:
        """Its address, and the certificate with which a worker calls it."""
        secret = self._core.read_namespaced_secret(tls_name(self._job, Role.WORKER), self._namespace)
        files = {name: base64.b64decode(content) for name, content in secret.data.items()}
        (pod,) = self._core.list_namespaced_pod(self._namespace, label_selector=selector(self._job, Role.MASTER)).items
        return f"{pod.status.pod_ip}:{MASTER_PORT}", files


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


async def serve(namespace: str, job: str, count: str, context: str = "") -> None:
    """Until SIGTERM."""
    stopped, core = asyncio.Event(), client.CoreV1Api(config.new_client_from_config(context=context or None))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    nodes = Nodes(core, namespace, job, int(count))
    try:
        nodes.register()
        with nodes:
            while not stopped.is_set():
                await asyncio.to_thread(nodes.beat)
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_SECONDS):
                        await stopped.wait()
        await nodes.close()
    finally:
        nodes.remove()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
