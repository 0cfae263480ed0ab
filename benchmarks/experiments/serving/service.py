"""The serving side at work: all requests at their time, whatever became of those before (an open loop), and what happened.

A replica comes into rotation when the cluster calls it ready and it has answered a look at its health, and leaves it as soon as
its pod is to go; what is under way there is finished. Of those in rotation the one with the fewest under way gets the next.
A request is sent once. Only one that no replica has taken, as the connection was refused before anything was sent, is tried with
another replica, which is counted. What the autoscaler decides follows from when requests are due, and is done at its time.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, field, fields
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from kubernetes import client

from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.lab import Lab, refusals, removing
from benchmarks.experiments.measures import Change
from benchmarks.experiments.pods import Pod, Pods, PodWatch, owner_of
from benchmarks.experiments.serving.demand import Autoscaler, LoadPlan, Scaling, requests_of, scalings
from benchmarks.experiments.serving.server import FINISH_SECONDS, HEALTH, LINGER_SECONDS, PIXELS, PORT, PREDICT
from benchmarks.job import flags_of
from benchmarks.processes import Failed, wait_until
from elasticdl.common.errors import ElasticDLError
from elasticdl.job.quantities import GPU

APP = "serving"
PRIORITY = 1000  # a training job has 0
LOG_LINES = 40
GRACE_SECONDS = int(LINGER_SECONDS + FINISH_SECONDS) + 5
IMAGES = 16
MOST_AT_ONCE = 1000
ANSWER_SECONDS = 30.0
HEALTH_SECONDS = 2.0
LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Request:
    """``latency`` counts from when it was due, whether or not it could be sent then; ``failure`` is empty if there was none."""

    time: float
    latency: float
    replica: str
    refused: int
    answer: int | None
    failure: str


@dataclass(slots=True)
class Records:
    """What has happened so far; ``clock`` counts from the load's beginning. ``rotations``: replicas that take requests."""

    clock: Callable[[], float] = lambda: 0.0
    requests: list[Request] = field(default_factory=list)
    rotations: list[Change] = field(default_factory=list)
    scalings: list[Scaling] = field(default_factory=list)

    def write(self, artefacts: Artefacts) -> None:
        columns = [each.name for each in fields(Request)]
        artefacts.table("requests", columns, map(astuple, self.requests))
        artefacts.table("rotation", ("time", "replicas"), [(each.time, each.gpus) for each in self.rotations])
        artefacts.text("scalings.jsonl", "".join(f"{json.dumps(asdict(each))}\n" for each in self.scalings))


class Images:
    """What is sent; the same image has to get the same answer from every replica."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"images {seed}")
        self._images = [self._rng.randbytes(PIXELS) for _ in range(IMAGES)]
        self._answers: dict[bytes, int] = {}

    def draw(self) -> bytes:
        return self._images[self._rng.randrange(len(self._images))]

    def objection(self, image: bytes, answer: int | None) -> str:
        if answer is None:
            return ""
        first = self._answers.setdefault(image, answer)
        return "" if answer == first else f"class {answer}, where the first answer was {first}"


def ready_addresses(pods: Pods, app: str) -> set[str]:
    """Of the pods of an app that are ready and not to go."""
    return {pod["status"]["podIP"] for pod in pods.values() if owner_of(pod) == app and _is_ready(pod)}


def _is_ready(pod: Pod) -> bool:
    status = pod.get("status", {})
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    stays = "deletionTimestamp" not in pod["metadata"]
    return conditions.get("Ready") == "True" and bool(status.get("podIP")) and stays


class Service(PodWatch):
    """Sends requests to the replicas, each in a thread, while its context lasts."""

    def __init__(self, core: client.CoreV1Api, namespace: str, app: str, port: int, records: Records) -> None:
        super().__init__(core, namespace)
        self._app = app
        self._port = port
        self._records = records
        self._ready: set[str] = set()  # addresses; whoever is not in rotation yet has to show its health
        self._rotation: dict[str, int] = {}  # requests under way by address; the one that was chosen last is the last
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, "requests")
        self._closed = threading.Event()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def wait_for_replicas(self, replicas: int, seconds: float, alive: Callable[[], None]) -> None:
        """Until so many are in rotation. ``alive`` raises if that is not to be expected any more."""
        where = f"at port {self._port} of their pods (run this where pods' addresses can be reached, such as in a pod)"
        what = f"{replicas} replicas that answer {where}"
        wait_until(lambda: len(self._rotation) >= replicas, seconds, what, alive)

    def play(
        self, plan: LoadPlan, autoscaler: Autoscaler, scale: Callable[[int], None], alive: Callable[[], None]
    ) -> None:
        """Send all of it, until every request has its reply. ``alive`` is called often, and raises if it is of no use any more."""
        images, clock = Images(plan.seed), self._records.clock
        requests: list[Future[None]] = []
        decisions: list[Future[None]] = []
        due = [(time, None) for time in requests_of(plan, autoscaler.rule.per_replica)]
        decided = [(each.time, each) for each in scalings(plan, autoscaler)]
        with ThreadPoolExecutor(1) as scaler:  # one after the other, so that they keep their order
            for moment, scaling in sorted([*due, *decided, (plan.curve.end, None)], key=lambda each: each[0]):
                alive()
                for decision in decisions:
                    if decision.done():
                        decision.result()
                time.sleep(max(0.0, moment - clock()))
                if scaling:
                    self._records.scalings.append(scaling)
                    decisions.append(scaler.submit(scale, scaling.replicas))
                elif moment < plan.curve.end:
                    requests.append(self._threads.submit(self._request, moment, images.draw(), images))
        for each in (*decisions, *requests):
            each.result()

    def _request(self, due: float, image: bytes, images: Images) -> None:
        replica, refused, answer, failure = self.send(image)
        failure = failure or images.objection(image, answer)
        latency = self._records.clock() - due
        self._records.requests.append(Request(due, latency, replica, refused, answer, failure))

    def send(self, image: bytes) -> tuple[str, int, int | None, str]:
        """To which replica, how many had refused it, the answer, and what went wrong if there is none."""
        refusals: list[str] = []
        address, deadline = "", time.monotonic() + ANSWER_SECONDS
        while (left := deadline - time.monotonic()) > 0 and (address := self.take(refusals, left)):
            with closing(HTTPConnection(address, self._port, timeout=left)) as connection:
                try:
                    connection.connect()
                except OSError:  # nothing was sent
                    refusals.append(address)
                else:
                    return (address, len(refusals), *_post(connection, image))
                finally:
                    self.give_back(address)
            if refusals.count(address) > 1:  # so has everybody else
                time.sleep(LOOK_SECONDS)
        where = f"from {address}" if address else "as no replica was in rotation"
        return address, len(refusals), None, f"no answer within {ANSWER_SECONDS:g} s {where}"

    # ---- the rotation ----

    def see(self, pods: Pods) -> None:
        self.become(ready_addresses(pods, self._app))

    def become(self, ready: set[str]) -> None:
        """The addresses of the replicas that are ready."""
        with self._news:
            new, self._ready = ready - self._ready, ready
            for address in new:
                self._threads.submit(self._admit, address)
            self._rotate({address: under_way for address, under_way in self._rotation.items() if address in ready})

    def _admit(self, address: str) -> None:
        """As soon as it answers, unless it goes away before."""
        while address in self._ready and not self._closed.is_set():
            connection = HTTPConnection(address, self._port, timeout=HEALTH_SECONDS)
            with suppress(OSError, HTTPException), closing(connection):  # not yet
                connection.request("GET", HEALTH)
                if connection.getresponse().status == 200:
                    self.admit(address)
                    return
            self._closed.wait(LOOK_SECONDS)

    def admit(self, address: str) -> None:
        with self._news:
            if address in self._ready:
                self._rotate({address: 0, **self._rotation})

    def _rotate(self, rotation: dict[str, int]) -> None:
        if rotation.keys() != self._rotation.keys():
            self._records.rotations.append(Change(self._records.clock(), "rotation", len(rotation)))
        self._rotation = rotation
        self._news.notify_all()

    def take(self, refusals: Collection[str], seconds: float) -> str:
        """Where to send a request, which counts as under way from now on; empty: nowhere."""

        def fewest() -> str:
            willing = [address for address in self._rotation if address not in refusals] or self._rotation
            return min(willing, key=self._rotation.__getitem__, default="")

        with self._news:
            if address := self._news.wait_for(fewest, seconds):
                self._rotation[address] = self._rotation.pop(address) + 1
            return address

    def give_back(self, address: str) -> None:
        with self._news:
            if address in self._rotation:
                self._rotation[address] -= 1


def _post(connection: HTTPConnection, image: bytes) -> tuple[int | None, str]:
    try:
        connection.request("POST", PREDICT, image)
        response = connection.getresponse()
        said: Any = response.read()
        return (
            (int(json.loads(said)["class"]), "")
            if response.status == 200
            else (None, f"{response.status} {said[:100]}")
        )
    except (OSError, HTTPException, ValueError, KeyError) as error:
        return None, f"{type(error).__name__}: {error}"


# ---- the Deployment: made, scaled, and removed ----


@contextmanager
def deployed(lab: Lab, replicas: int, seconds: float) -> Iterator[Callable[[int], None]]:
    """For as long as the context lasts; what it gives scales the Deployment.

    ``seconds``: of a request on a simulated GPU; 0: the GPUs are real.
    """
    api: Any = client.AppsV1Api(lab.core.api_client)
    classes, priority = client.SchedulingV1Api(lab.core.api_client), f"{APP}-{lab.namespace}"

    def scale(replicas: int) -> None:
        change = {"spec": {"replicas": replicas}}
        with refusals(f"scale Deployment {APP}"):
            api.patch_namespaced_deployment_scale(APP, lab.namespace, change, _request_timeout=30.0)

    with refusals(f"make PriorityClass {priority}"):
        metadata = client.V1ObjectMeta(name=priority)
        classes.create_priority_class(client.V1PriorityClass(metadata=metadata, value=PRIORITY))
    try:
        manifest = _manifest(lab, replicas, seconds, priority)
        with refusals(f"make Deployment {APP}"):
            api.create_namespaced_deployment(lab.namespace, manifest, _request_timeout=30.0)
        yield scale
    finally:
        with removing(f"Deployment {APP}"):  # its pods go with it
            api.delete_namespaced_deployment(APP, lab.namespace, propagation_policy="Foreground")
        with removing(f"PriorityClass {priority}"):
            classes.delete_priority_class(priority)


def _manifest(lab: Lab, replicas: int, seconds: float, priority: str) -> dict[str, Any]:
    labels = {"app": APP}
    options = {"seed": lab.options.seed, "seconds": f"{seconds:g}"}
    threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS") if seconds else ()
    env = {"PYTHONPATH": lab.options.repository, "TF_CPP_MIN_LOG_LEVEL": "2", **dict.fromkeys(threads, "1")}
    container = {
        "name": "server",
        "image": lab.options.image,
        "command": ["python", "-m", "benchmarks.experiments.serving.server", *flags_of(options)],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *({"name": name, "value": value} for name, value in env.items()),
        ],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": HEALTH, "port": PORT}, "periodSeconds": 1},
        "resources": {"limits": {GPU: "1"}},
    }
    spec = {
        "priorityClassName": priority,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
    }
    return {
        "metadata": {"name": APP},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def save_logs(lab: Lab, path: Path) -> None:
    """The last lines of each replica that is still there."""
    said: list[str] = []
    try:
        with refusals("look at the replicas' logs"):
            pods: Any = lab.core.list_namespaced_pod(lab.namespace, label_selector=f"app={APP}")
            for name in [pod.metadata.name for pod in pods.items]:
                said += [f"-- {name}", lab.core.read_namespaced_pod_log(name, lab.namespace, tail_lines=LOG_LINES)]
    except (ElasticDLError, Failed) as error:  # something has failed already: that is what is to be told
        said.append(str(error))
    path.write_text("\n".join(said) + "\n")
