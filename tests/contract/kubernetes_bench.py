"""Workers as pods of a real cluster, for tests: a Job that owns them, and a launcher."""

import asyncio
import random
import threading
from contextlib import asynccontextmanager
from dataclasses import replace

from elasticdl.places.pods.launcher import KubernetesLauncher, Patience
from kubernetes import client
from test_launcher_contract import DEADLINE, Bench

from elasticdl.common.credentials import Role
from elasticdl.job.spec import WorkerRange
from elasticdl.kube.client import Client, connect
from elasticdl.kube.kubeconfig import Place
from elasticdl.kube.manifests.names import labels, selector, state_name
from elasticdl.master.state.events import WorkerPending
from elasticdl.places.pods.worker_pods import Owner, WorkerPodApi, WorkerPods

JOB = "bench"
# Ends with the code that a test writes into a file; told to leave, it takes a moment and ends with 0.
PROGRAM = """
trap 'exit 0' TERM
while [ ! -e "$WORK/$ELASTICDL_WORKER_ID" ]; do sleep 0.05; done
exit $(cat "$WORK/$ELASTICDL_WORKER_ID")
"""


def make_owner(api, namespace, job=JOB):
    """A Job that starts nothing by itself, and the state that it owns: without them pods would be collected as garbage."""
    body = {
        "metadata": {"name": f"{job}-master"},
        "spec": {
            "parallelism": 0,
            "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "none", "image": "none"}]}},
        },
    }
    made = client.BatchV1Api(api).create_namespaced_job(namespace, body)
    owner = Owner(made.metadata.name, made.metadata.uid)
    metadata = {"name": state_name(job), "ownerReferences": [owner.reference()]}
    state = client.CoreV1Api(api).create_namespaced_config_map(namespace, {"metadata": metadata})
    return replace(owner, state_uid=state.metadata.uid)


def template(image, work, gpus, job=JOB, **spec):
    return {
        "metadata": {"labels": labels(job, Role.WORKER), "annotations": {}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "elasticdl",
                    "image": image,
                    "command": ["sh", "-c", PROGRAM],
                    "env": [{"name": "WORK", "value": str(work)}],
                    "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
                }
            ],
            **spec,
        },
    }


def make_launcher(api, pods, report, patience=None):
    shared = Client(api, pods.namespace)
    return KubernetesLauncher(WorkerPodApi(shared, pods.job), pods, report, patience or Patience(), random.Random(7))


def api_of(cluster):
    return connect(Place(file=str(cluster.kubeconfig))).api


def worker_pods(cluster, namespace, work, gpus=3, **spec):
    owner = make_owner(api_of(cluster), namespace)
    return WorkerPods(
        JOB,
        namespace,
        owner,
        template(cluster.image, work, gpus, **spec),
        limits=lambda: WorkerRange(minimum=1, maximum=4),
    )


def pods_left(api, namespace):
    """Names of the workers' pods that are not over."""
    found = client.CoreV1Api(api).list_namespaced_pod(namespace, label_selector=selector(JOB, Role.WORKER))
    return [pod.metadata.name for pod in found.items if pod.status.phase in ("Pending", "Running")]


def threads_left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kubernetes")]


class PatientBench(Bench):
    """Reports about several pods come in any order here, and a pod may wait for more than one thing."""

    def __init__(self, end):
        super().__init__(end)
        self.early = []

    async def next(self, kind):
        while not (found := [report for report in self.early if isinstance(report, kind)]):
            self.early.append(await asyncio.wait_for(self.reports.get(), DEADLINE))
        self.early.remove(found[0])
        return found[0]

    def nothing_more(self):
        while not self.reports.empty():
            self.early.append(self.reports.get_nowait())
        return all(isinstance(report, WorkerPending) for report in self.early)


@asynccontextmanager
async def kubernetes_bench(cluster, namespace, work):
    """As the benches of the contract: room for two workers, as each takes all of a node's GPUs."""

    def end(worker_id, code):
        (work / f".{worker_id}").write_text(str(code))
        (work / f".{worker_id}").rename(work / str(worker_id))

    bench, api = PatientBench(end), api_of(cluster)
    bench.launcher = make_launcher(api, worker_pods(cluster, namespace, work), bench.reports.put_nowait)
    try:
        await bench.launcher.find()
        yield bench
    finally:
        await bench.launcher.close()
    assert pods_left(api, namespace) == []
