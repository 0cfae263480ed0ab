"""The pods of a job: `master_pod` and `worker_pod` from its specification.

The user's templates and module change what comes out; `finish_master_pod` and `finish_pod` then settle what is not theirs to
change. A worker's pod is made once, without its name and number, when the job is submitted, and kept with the
specification: what the user's template and cluster module say is settled there, and a master that is started anew makes
the same pods.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from elasticdl.common import environment as variables
from elasticdl.common.credentials import Role
from elasticdl.common.startup import HASH_SEED
from elasticdl.job import quantities
from elasticdl.job.spec import JobSpec
from elasticdl.kube.manifests import kueue_group, names
from elasticdl.kube.manifests.merge import Manifest, merge

TLS_FOLDER = "/etc/elasticdl/tls"
SPEC_FOLDER = "/etc/elasticdl/job"
SPEC_FILE = "job.json"
TEMPLATE_FILE = "worker.json"
# A worker goes on so long without a master, which may have to be put on another node and pull its image there.
MASTER_TIMEOUT = 600.0
# -P: the working directory is the user's, whose `queue.py` would be imported in the place of Python's own. The agent starts the workers,
# and gives them what they need on their path.
MASTER_COMMAND = ("python", "-P", "-m", "elasticdl.master.shell.cluster_master", "--job_folder", SPEC_FOLDER)
AGENT_COMMAND = ("python", "-P", "-m", "elasticdl.places.agent")
# After its grace period a worker still has to be judged, and a checkpoint's last file to be closed.
GRACE_MARGIN = 10.0
# The user that an image runs as is not known, nor a group that the cluster would let it have; and a group of ours for
# the pod's files would take over those of the user's claims. In the pod nobody else is there to read them.
_FILE_MODE = 0o444
# What a cluster puts on a node that it does not hear of. By itself it would wait five minutes for the node to come back.
_LOST_NODE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def master_pod(spec: JobSpec) -> Manifest:
    """The master's pod, without a name."""
    env = (
        _of_the_pod(variables.HOST, "status.podIP"),
        _of_the_pod(variables.NAMESPACE, "metadata.namespace"),
        _of_the_pod(variables.POD_UID, "metadata.uid"),
    )
    workers = quantities.parse_priority(spec.worker_pod_priority)
    # Were it less urgent than its workers, it would be the first to be preempted, for a worker of its own perhaps.
    name = spec.master_pod_priority or (workers.class_name if workers and workers.share else "")
    priority = {"priorityClassName": name} if name else {}
    return make_pod(spec, Role.MASTER, MASTER_COMMAND, env, pod_spec={**_identity(spec), **priority})


def as_urgent(master: Manifest, worker: Manifest) -> Manifest:
    """The master's pod with the class that a template gives the workers' alone, if it has none itself."""
    name = worker["spec"].get("priorityClassName")
    return merge({"spec": {"priorityClassName": name}}, master) if name else master


def finish_master_pod(pod: Manifest, spec: JobSpec) -> Manifest:
    """As `finish_pod`. An account that a template names for all pods is the workers': the master has to have its own."""
    made = merge(pod, {"spec": {"serviceAccount": None, **_identity(spec)}})
    return finish_pod(made, spec, Role.MASTER)


def _identity(spec: JobSpec) -> Manifest:
    account = spec.service_account or names.master_name(spec.job_name)
    return {"serviceAccountName": account, "automountServiceAccountToken": True}


def worker_pod(spec: JobSpec, namespace: str) -> Manifest:
    """A pod for workers, without its name and number."""
    env = [
        _variable(variables.MASTER, names.master_address(spec.job_name, namespace)),
        _variable(variables.MASTER_TIMEOUT, f"{MASTER_TIMEOUT:g}"),
        _of_the_pod(variables.HOST, "status.podIP"),
        _of_the_pod(variables.PLACE, "metadata.name"),
        _of_the_pod(variables.NODE, "spec.nodeName"),
        _variable("PYTHONHASHSEED", HASH_SEED),
    ]
    limits = quantities.requirements(spec.worker_resource_request, spec.worker_resource_limit).get("limits", {})
    if processors := limits.get("cpu"):  # else it would start a thread for each of the node's, and be throttled
        env.append(_variable("OMP_NUM_THREADS", str(math.ceil(quantities.processors(processors)))))
    metadata, pod_spec = _queueing(spec)
    return make_pod(spec, Role.WORKER, AGENT_COMMAND, env, metadata, pod_spec)


def _queueing(spec: JobSpec) -> tuple[Manifest, Manifest]:
    """Metadata and further keys of the pod's spec, by which a queueing scheduler knows the workers."""
    queue, size, group = (
        quantities.parse_queue(spec.queue),
        str(spec.num_workers.minimum),
        names.group_name(spec.job_name),
    )
    if queue is None:
        return {}, {}
    if queue.scheduler == quantities.KUEUE:
        own_labels = {"kueue.x-k8s.io/queue-name": queue.name}
        if not spec.gang:
            return {"labels": own_labels}, {}
        grouped = {**own_labels, names.KUEUE_GROUP_LABEL: group}
        return {"labels": grouped, "annotations": {**kueue_group.ANNOTATIONS, kueue_group.SIZE: size}}, {}
    # Volcano takes a gang's size from the group that is named here, and from pods' owners; from the pods it does not.
    gang = {names.VOLCANO_GROUP: group, "scheduling.volcano.sh/group-min-member": size} if spec.gang else {}
    annotations = {"scheduling.volcano.sh/queue-name": queue.name, **gang}
    return {"annotations": annotations}, {"schedulerName": queue.scheduler}


def volcano_group(spec: JobSpec, worker: Manifest) -> Manifest | None:
    """What makes Volcano place the workers of a gang together; None for other jobs. ``worker``: a pod of them."""
    queue = quantities.parse_queue(spec.queue)
    if queue is None or queue.scheduler != quantities.VOLCANO or not spec.gang:
        return None
    urgent = quantities.parse_priority(spec.worker_pod_priority)
    # Volcano compares jobs by the classes of their groups, whatever those of the pods are.
    name = urgent.class_name if urgent and urgent.share else worker["spec"].get("priorityClassName")
    priority = {"priorityClassName": name} if name else {}
    return {"minMember": spec.num_workers.minimum, "queue": queue.name, **priority}


def make_pod(
    spec: JobSpec,
    role: Role,
    command: Sequence[str],
    env: Sequence[Manifest] = (),
    metadata: Mapping[str, Any] | None = None,
    pod_spec: Mapping[str, Any] | None = None,
) -> Manifest:
    """A pod's ``metadata`` and ``spec``, without a name; of both, further keys are given. The job's own variables come
    after ``env``.

    It needs no rights on its node: no root, nothing to escalate to, a root file system that is only read, and what is
    written goes to ``/tmp`` and ``/dev/shm`` or to the job's volumes.
    """
    mounts = _mounts(spec, role)
    made: Manifest = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": math.ceil(spec.stop_grace + GRACE_MARGIN),
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(spec, role, command, env, [mount for _, mount in mounts])],
        "volumes": list({volume["name"]: volume for volume, _ in mounts}.values()),
        **(pod_spec or {}),
    }
    # Also here, not only in `finish_pod`: by its labels the user's module tells a master from a worker.
    own = {"annotations": {}, "labels": names.labels(spec.job_name, role)}
    return {"metadata": merge(own, metadata or {}), "spec": made}


def finish_pod(pod: Manifest, spec: JobSpec, role: Role) -> Manifest:
    """The pod as the user left it, with the labels by which the job's pods are found, and a lost node's tolerations."""
    fixed = {**names.labels(spec.job_name, role), **({names.ELASTIC_LABEL: "true"} if spec.elastic else {})}
    missing = _node_tolerations(pod["spec"].get("tolerations") or (), spec.node_timeout)
    return merge(pod, {"metadata": {"labels": fixed}, "spec": {"tolerations": missing}})


def _node_tolerations(given: Sequence[Mapping[str, Any]], seconds: int) -> list[Manifest]:
    """Tolerations of a lost node, for taints that the user's own do not name: of two the shorter would count."""
    said = {each.get("key") or "" for each in given if each.get("effect") in (None, "", "NoExecute")}
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
        for key in _LOST_NODE
        if not said & {key, ""}
    ]


def _container(
    spec: JobSpec, role: Role, command: Sequence[str], env: Sequence[Manifest], mounts: list[Manifest]
) -> Manifest:
    plain = {
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        variables.JOB_SPEC: f"{SPEC_FOLDER}/{SPEC_FILE}",
        variables.TLS: TLS_FOLDER,
    }
    all_env = (*env, *(_variable(name, value) for name, value in plain.items()), *_given_variables(spec))
    made: Manifest = {
        "name": names.CONTAINER,
        "image": spec.image,
        "command": list(command),
        "env": list({variable["name"]: variable for variable in all_env}.values()),
        "resources": quantities.requirements(
            getattr(spec, f"{role}_resource_request"), getattr(spec, f"{role}_resource_limit")
        ),
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The end of what it printed is part of the status then, for a worker that failed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if whole := [each.secret for each in quantities.parse_secret_envs(spec.env_from_secret) if not each.key]:
        made["envFrom"] = [{"secretRef": {"name": secret}} for secret in whole]
    if spec.image_pull_policy:
        made["imagePullPolicy"] = spec.image_pull_policy
    return made


def _given_variables(spec: JobSpec) -> list[Manifest]:
    """The user's. Whoever may look at pods and config maps does not see the values: they are in Secrets."""
    kept = [(name, names.environment_name(spec.job_name), name) for name in quantities.parse_envs(spec.envs)]
    kept += [(one.name, one.secret, one.key) for one in quantities.parse_secret_envs(spec.env_from_secret) if one.key]
    return [{"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for name, secret, key in kept]


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _of_the_pod(variable: str, path: str) -> Manifest:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _mounts(spec: JobSpec, role: Role) -> list[tuple[Manifest, Manifest]]:
    """Volumes, each with where it is mounted; one that is mounted at two places comes twice."""
    secret = {"secretName": names.tls_name(spec.job_name, role), "defaultMode": _FILE_MODE}
    made = [
        _mount("tls", TLS_FOLDER, {"secret": secret}),
        _mount("job", SPEC_FOLDER, {"configMap": {"name": names.spec_name(spec.job_name), "defaultMode": _FILE_MODE}}),
    ]
    volumes = quantities.parse_volumes(spec.volume)
    # NCCL and loaders of data exchange through shared memory, of which a container has 64 MiB by itself.
    for name, path, medium in (("tmp", "/tmp", {}), ("shm", "/dev/shm", {"medium": "Memory"})):
        if path not in {volume.mount_path.rstrip("/") for volume in volumes}:
            made.append(_mount(name, path, {"emptyDir": medium}, read_only=False))
    known: dict[str, str] = {}
    for volume in volumes:
        kind = {"type": volume.type} if volume.type else {}
        source: Manifest = {"hostPath": {"path": volume.host_path, **kind}}
        if volume.claim_name:
            source = {"persistentVolumeClaim": {"claimName": volume.claim_name}}
        name = known.setdefault(repr(source), f"volume-{len(known)}")
        path = volume.mount_path.rstrip("/") or "/"  # one spelling: the cluster refuses two that are the same
        made.append(_mount(name, path, source, volume.read_only, volume.sub_path))
    return made


def _mount(
    name: str, path: str, source: Manifest, read_only: bool = True, sub_path: str = ""
) -> tuple[Manifest, Manifest]:
    further = {**({"readOnly": True} if read_only else {}), **({"subPath": sub_path} if sub_path else {})}
    return {"name": name, **source}, {"name": name, "mountPath": path, **further}
