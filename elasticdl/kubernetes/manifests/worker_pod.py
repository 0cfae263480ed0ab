"""What all worker pods of a job have in common; the master adds who each one is.

Made once, when the job is submitted, and kept with its specification: what the user's template and cluster module say
is settled there, and a master that is started anew makes the same pods.
"""

from __future__ import annotations

import math

from elasticdl.common import environment as variables
from elasticdl.common.credentials import Role
from elasticdl.common.quantities import KUEUE, parse_quantity, parse_queue, requirements
from elasticdl.common.spec import JobSpec
from elasticdl.kubernetes.manifests.names import master_address
from elasticdl.kubernetes.manifests.pod import Manifest, Program, make_pod

TEMPLATE_FILE = "worker.json"
# A worker goes on so long without a master, which may have to be put on another node and pull its image there.
MASTER_TIMEOUT = 600.0
WORKER_COMMAND = ("python", "-m", "elasticdl.worker.main")
OWN_PROGRAM = ("python", "-m", "elasticdl.common.startup")


def worker_pod(spec: JobSpec, namespace: str) -> Manifest:
    """A worker's pod without its name and number."""
    annotations, labels, pod = _queueing(spec)
    program = Program(
        role=Role.WORKER,
        command=(*OWN_PROGRAM, *map(_literal, spec.command)) if spec.command else WORKER_COMMAND,
        resources=requirements(spec.worker_resource_request, spec.worker_resource_limit),
        env=_environment(spec, namespace),
        annotations=annotations,
        labels=labels,
        spec=pod,
    )
    return make_pod(spec, program)


def _literal(word: str) -> str:
    """Escaped: Kubernetes replaces $(NAME) by a variable, and $$ by $."""
    return word.replace("$", "$$")


def _environment(spec: JobSpec, namespace: str) -> tuple[Manifest, ...]:
    made: list[Manifest] = [
        {"name": variables.MASTER, "value": master_address(spec.job_name, namespace)},
        {"name": variables.MASTER_TIMEOUT, "value": f"{MASTER_TIMEOUT:g}"},
        {"name": variables.HOST, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    limits = requirements(spec.worker_resource_request, spec.worker_resource_limit).get("limits", {})
    if processors := limits.get("cpu"):  # else it would start a thread for each of the node's, and be throttled
        made.append({"name": "OMP_NUM_THREADS", "value": str(math.ceil(parse_quantity(processors)))})
    return tuple(made)


def _queueing(spec: JobSpec) -> tuple[dict[str, str], dict[str, str], Manifest]:
    """Annotations, labels and further keys of the pod's spec, by which a queueing scheduler knows the workers."""
    queue, size = parse_queue(spec.queue), str(spec.num_workers.maximum)
    if queue is None:
        return {}, {}, {}
    if queue.scheduler == KUEUE:
        labels = {"kueue.x-k8s.io/queue-name": queue.name}
        if not spec.gang:
            return {}, labels, {}
        group = {"kueue.x-k8s.io/pod-group-name": f"{spec.job_name}-workers"}
        return {"kueue.x-k8s.io/pod-group-total-count": size}, {**labels, **group}, {}
    annotations = {"scheduling.volcano.sh/queue-name": queue.name}
    if spec.gang:
        annotations["scheduling.volcano.sh/group-min-member"] = size
    return annotations, {}, {"schedulerName": queue.scheduler}
