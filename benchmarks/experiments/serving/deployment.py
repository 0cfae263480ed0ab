"""The Deployment of the inference service: made, scaled, and removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kubernetes import client

from benchmarks.experiments.lab import Lab, refusals, removing
from benchmarks.experiments.serving.server import FINISH_SECONDS, HEALTH, LINGER_SECONDS, PORT
from benchmarks.job import flags_of
from benchmarks.processes import Failed
from elasticdl.common.errors import ElasticDLError
from elasticdl.job.quantities import GPU

APP = "serving"
PRIORITY = 1000  # a training job has 0
LOG_LINES = 40
GRACE_SECONDS = int(LINGER_SECONDS + FINISH_SECONDS) + 5


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
