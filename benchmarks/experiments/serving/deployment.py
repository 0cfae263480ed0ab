"""The Deployment of the inference service: made, scaled, and removed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client

from benchmarks.experiments.lab import Lab, refusals
from benchmarks.experiments.options import ClusterKind
from benchmarks.experiments.serving.server import FINISH_SECONDS, HEALTH, LINGER_SECONDS, PORT
from benchmarks.job import flags_of
from benchmarks.processes import Failed
from elasticdl.common.errors import ElasticDLError
from elasticdl.job.quantities import GPU

APP = "serving"
PRIORITY = 1000  # a training job has 0
OWN_FOLDER = "/serving"
LOG_LINES = 40
GRACE_SECONDS = int(LINGER_SECONDS + FINISH_SECONDS) + 5


@dataclass(frozen=True, slots=True)
class Deployment:
    lab: Lab
    seconds: float  # of a request on a simulated GPU; 0: the GPUs are real
    model: str  # where the replicas find it, or make it; empty: each makes one of its own

    def scale(self, replicas: int) -> None:
        """Raises:
        ElasticDLError, Failed: the cluster refused, or does not answer.
        """
        change = {"spec": {"replicas": replicas}}
        with refusals(f"scale Deployment {APP}"):
            self._api.patch_namespaced_deployment_scale(APP, self.lab.namespace, change, _request_timeout=30.0)

    def make(self, replicas: int) -> None:
        """Raises:
        ElasticDLError, Failed: the cluster refused, or does not answer.
        """
        manifest = self._manifest(replicas, self.lab.make_priority_class(APP, PRIORITY))
        with refusals(f"make Deployment {APP}"):
            self._api.create_namespaced_deployment(self.lab.namespace, manifest, _request_timeout=30.0)

    def remove(self) -> None:
        """Its pods go with it.

        Raises:
            ElasticDLError, Failed: the cluster refused, or does not answer.
        """
        with refusals(f"remove Deployment {APP}"):
            self._api.delete_namespaced_deployment(APP, self.lab.namespace, propagation_policy="Foreground")

    @property
    def _api(self) -> Any:
        return client.AppsV1Api(self.lab.core.api_client)

    def _manifest(self, replicas: int, priority_class: str) -> dict[str, Any]:
        labels = {"app": APP}
        # The nodes of tier 1 see what is here.
        own = not self.model and self.lab.options.cluster is not ClusterKind.TIER1
        model = self.model or (f"{OWN_FOLDER}/model" if own else str(self.lab.folder / "model"))
        options = {"model": model, "seed": str(self.lab.options.seed), "seconds": f"{self.seconds:g}"}
        threads = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS") if self.seconds else ()
        env = {"PYTHONPATH": self.lab.options.repository, "TF_CPP_MIN_LOG_LEVEL": "2", **dict.fromkeys(threads, "1")}
        container = {
            "name": "server",
            "image": self.lab.options.image,
            "command": ["python", "-m", "benchmarks.experiments.serving.server", *flags_of(options)],
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                *({"name": name, "value": value} for name, value in env.items()),
            ],
            "ports": [{"containerPort": PORT}],
            "readinessProbe": {"httpGet": {"path": HEALTH, "port": PORT}, "periodSeconds": 1},
            "resources": {"limits": {GPU: "1"}},
            "volumeMounts": [{"name": "model", "mountPath": OWN_FOLDER}] if own else [],
        }
        spec = {
            "priorityClassName": priority_class,
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "containers": [container],
            "volumes": [{"name": "model", "emptyDir": {}}] if own else [],
        }
        return {
            "metadata": {"name": APP},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        }


@contextmanager
def deployed(deployment: Deployment, replicas: int) -> Iterator[Deployment]:
    """For as long as the context lasts."""
    deployment.make(replicas)
    try:
        yield deployment
    finally:
        try:
            deployment.remove()
        except (ElasticDLError, Failed) as error:
            print(f"warning: could not be removed: {error}", file=sys.stderr)


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
