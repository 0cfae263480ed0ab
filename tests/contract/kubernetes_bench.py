"""Pods of a real cluster as places, for tests: a Job that owns them, and a program in the agent's place."""

import random
import threading
from contextlib import asynccontextmanager
from functools import partial

from kubernetes import client
from places_kit import bench_of

from elasticdl.common.credentials import Role
from elasticdl.job.spec import WorkerRange
from elasticdl.kube.client import Client, connect
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.names import job_reference, labels, selector, state_name
from elasticdl.places.pod_places import PodPlaces, PodTimeouts
from elasticdl.places.worker_pods import WorkerPodApi, WorkerPods, owner_references

JOB = "bench"
# Ends with the code that a test writes into a file; told to leave, it takes a moment and ends with 0.
PROGRAM = """
trap 'exit 0' TERM
while [ ! -e "$WORK/$ELASTICDL_PLACE" ]; do sleep 0.05; done
exit $(cat "$WORK/$ELASTICDL_PLACE")
"""


def make_owners(api, namespace, job_name=JOB):
    """A Job that starts nothing by itself, and the state that it owns: without them pods would be collected as garbage."""
    body = {
        "metadata": {"name": f"{job_name}-master"},
        "spec": {
            "parallelism": 0,
            "template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "none", "image": "none"}]}},
        },
    }
    made = client.BatchV1Api(api).create_namespaced_job(namespace, body)
    job = {"metadata": {"name": made.metadata.name, "uid": made.metadata.uid}}
    metadata = {"name": state_name(job_name), "ownerReferences": [job_reference(job)]}
    state = client.CoreV1Api(api).create_namespaced_config_map(namespace, {"metadata": metadata})
    return owner_references(job, {"metadata": {**metadata, "uid": state.metadata.uid}})


def template(image, work):
    return {
        "metadata": {"labels": labels(JOB, Role.WORKER), "annotations": {}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 5,
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": "elasticdl",
                    "image": image,
                    "command": ["sh", "-c", PROGRAM],
                    "env": [
                        {"name": "WORK", "value": str(work)},
                        {"name": "ELASTICDL_PLACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                    ],
                    "resources": {"limits": {"nvidia.com/gpu": "3"}},  # all of a node
                }
            ],
        },
    }


def make_places(api, pods, report):
    """Nobody tells what runs in the pods to leave."""
    shared = WorkerPodApi(Client(api, pods.namespace), pods.job)
    return PodPlaces(shared, pods, report, PodTimeouts(leave=0.0), random.Random(7))


def api_of(cluster):
    return connect(ClusterTarget(file=str(cluster.kubeconfig))).api


def worker_pods(cluster, namespace, work):
    owners, limits = make_owners(api_of(cluster), namespace), WorkerRange(minimum=1, maximum=4)
    return WorkerPods(JOB, namespace, owners, template(cluster.image, work), limits=lambda: limits)


def pods_left(api, namespace):
    """Names of those that are not over."""
    found = client.CoreV1Api(api).list_namespaced_pod(namespace, label_selector=selector(JOB, Role.WORKER))
    return [pod.metadata.name for pod in found.items if pod.status.phase in ("Pending", "Running")]


def threads_left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kubernetes")]


def name(number):
    return f"{JOB}-worker-{number}"


@asynccontextmanager
async def kubernetes_bench(cluster, namespace, work):
    """As the benches of the contract: room for two, as each takes all of a node's GPUs."""
    api = api_of(cluster)
    core = client.CoreV1Api(api)

    def lose(bench, place_id):
        core.delete_namespaced_pod(place_id, namespace)

    async with bench_of(partial(make_places, api, worker_pods(cluster, namespace, work)), lose) as bench:
        yield bench
    assert pods_left(api, namespace) == []
