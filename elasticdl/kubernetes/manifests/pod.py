"""The pods of a job, master's and workers' alike: `make_pod` from what is to run in it.

The user's templates and module change what comes out; `finish_pod` then settles what is not theirs to change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticdl.common import environment as variables
from elasticdl.common.credentials import Role
from elasticdl.common.quantities import Volume, parse_envs, parse_secret_envs, parse_volumes
from elasticdl.common.spec import JobSpec
from elasticdl.kubernetes.manifests.merge import merge
from elasticdl.kubernetes.manifests.names import CONTAINER, ELASTIC_LABEL, environment_name, labels, spec_name, tls_name

Manifest = dict[str, Any]
TLS_FOLDER = "/etc/elasticdl/tls"
SPEC_FOLDER = "/etc/elasticdl/job"
SPEC_FILE = "job.json"
# After its grace period a worker still has to be judged, and a checkpoint's last file to be closed.
GRACE_MARGIN = 10.0
# The user that an image runs as is not known, nor a group that the cluster would let it have; and a group of ours for
# the pod's files would take over those of the user's claims. In the pod nobody else is there to read them.
_FILE_MODE = 0o444
# What a cluster puts on a node that it does not hear of. By itself it would wait five minutes for the node to come back.
_LOST_NODE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder of a pod and what it is filled from: the ``source`` of a volume."""

    name: str
    path: str
    source: Mapping[str, Any]
    read_only: bool = True
    sub_path: str = ""

    def volume(self) -> Manifest:
        return {"name": self.name, **self.source}

    def mount(self) -> Manifest:
        made: Manifest = {"name": self.name, "mountPath": self.path}
        if self.read_only:
            made["readOnly"] = True
        if self.sub_path:
            made["subPath"] = self.sub_path
        return made


@dataclass(frozen=True, slots=True)
class Program:
    """What a pod is to run. ``env`` is a list of variables as Kubernetes has them; the job's own come after it."""

    role: Role
    command: tuple[str, ...]
    resources: Mapping[str, Mapping[str, str]]
    priority_class: str = ""
    env: tuple[Manifest, ...] = ()
    mounts: tuple[Mount, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)  # further keys of the pod's spec


def make_pod(spec: JobSpec, program: Program) -> Manifest:
    """A pod's ``metadata`` and ``spec``, without a name.

    It needs no rights on its node: no root, nothing to escalate to, a root file system that is only read, and what is
    written goes to ``/tmp`` and ``/dev/shm`` or to the job's volumes.
    """
    own = (*job_mounts(spec.job_name, program.role), *program.mounts)
    users = user_mounts(spec.volume)
    taken = {mount.path.rstrip("/") for mount in users}
    mounts = (*own, *(mount for mount in scratch_mounts() if mount.path not in taken), *users)
    pod_spec: Manifest = {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace_period(spec),
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(spec, program, mounts)],
        "volumes": _once(mounts),
        **program.spec,
    }
    if program.priority_class:
        pod_spec["priorityClassName"] = program.priority_class
    # Also here, not only in `finish_pod`: by its labels the user's module tells a master from a worker.
    own_labels = {**program.labels, **labels(spec.job_name, program.role)}
    return {"metadata": {"annotations": dict(program.annotations), "labels": own_labels}, "spec": pod_spec}


def finish_pod(pod: Manifest, spec: JobSpec, role: Role) -> Manifest:
    """The pod as the user left it, with the labels by which the job's pods are found, and a lost node's tolerations."""
    fixed = {**labels(spec.job_name, role), **({ELASTIC_LABEL: "true"} if spec.elastic else {})}
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


def grace_period(spec: JobSpec) -> int:
    """Seconds from being told to leave to being killed."""
    return math.ceil(spec.stop_grace + GRACE_MARGIN)


def _container(spec: JobSpec, program: Program, mounts: tuple[Mount, ...]) -> Manifest:
    plain = {
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        variables.JOB_SPEC: f"{SPEC_FOLDER}/{SPEC_FILE}",
        variables.TLS: TLS_FOLDER,
    }
    own = (*program.env, *({"name": name, "value": value} for name, value in plain.items()))
    env = {variable["name"]: variable for variable in (*own, *_given_variables(spec))}
    made: Manifest = {
        "name": CONTAINER,
        "image": spec.image,
        "command": list(program.command),
        "env": list(env.values()),
        "resources": dict(program.resources),
        "volumeMounts": [mount.mount() for mount in mounts],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # The end of what it printed is part of the status then, for a worker that failed.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if whole := [each.secret for each in parse_secret_envs(spec.env_from_secret) if not each.key]:
        made["envFrom"] = [{"secretRef": {"name": secret}} for secret in whole]
    if spec.image_pull_policy:
        made["imagePullPolicy"] = spec.image_pull_policy
    return made


def _given_variables(spec: JobSpec) -> list[Manifest]:
    """The user's. Whoever may look at pods and config maps does not see the values: they are in Secrets."""
    kept = [(name, environment_name(spec.job_name), name) for name in parse_envs(spec.envs)]
    kept += [(each.name, each.secret, each.key) for each in parse_secret_envs(spec.env_from_secret) if each.key]
    return [{"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for name, secret, key in kept]


def job_mounts(job: str, role: Role) -> tuple[Mount, ...]:
    """What every pod of a job is given: its own certificate, and the job's specification."""
    secret = {"secretName": tls_name(job, role), "defaultMode": _FILE_MODE}
    return (
        Mount("tls", TLS_FOLDER, {"secret": secret}),
        Mount("job", SPEC_FOLDER, {"configMap": {"name": spec_name(job), "defaultMode": _FILE_MODE}}),
    )


def scratch_mounts() -> tuple[Mount, ...]:
    """NCCL and loaders of data exchange through shared memory, of which a container has 64 MiB by itself."""
    return (
        Mount("tmp", "/tmp", {"emptyDir": {}}, read_only=False),
        Mount("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}, read_only=False),
    )


def user_mounts(text: str) -> tuple[Mount, ...]:
    """Those of ``--volume``; a claim or folder that is mounted at two places is one volume."""
    made: list[Mount] = []
    names: dict[str, str] = {}
    for volume in parse_volumes(text):
        source = _source(volume)
        name = names.setdefault(repr(source), f"volume-{len(names)}")
        made.append(Mount(name, volume.mount_path, source, volume.read_only, volume.sub_path))
    return tuple(made)


def _source(volume: Volume) -> Manifest:
    if volume.claim_name:
        return {"persistentVolumeClaim": {"claimName": volume.claim_name}}
    kind = {"type": volume.host_path_type} if volume.host_path_type else {}
    return {"hostPath": {"path": volume.host_path, **kind}}


def _once(mounts: tuple[Mount, ...]) -> list[Manifest]:
    return list({mount.name: mount.volume() for mount in mounts}.values())
