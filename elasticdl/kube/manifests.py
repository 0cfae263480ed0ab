"""What a job consists of on a cluster: its pods, by `worker_template` and `master_template`, and before any worker is there the objects
around them, by `make_job` and `companions`. All are pure functions of its specification.

The user's templates change what `worker_pod` and `master_pod` make; `finish_pod` then settles what is not theirs to change. A
worker's pod is made once, without its name and number, when the job is submitted, and kept with the specification: a master
that is started anew makes the same pods. The Job keeps one master pod alive, and owns the rest: whoever deletes it deletes all.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from elasticdl.common import credentials as variables
from elasticdl.common.credentials import Role, TlsFiles
from elasticdl.common.errors import UserError
from elasticdl.common.front_ends import HASH_SEED
from elasticdl.common.reason import flat
from elasticdl.job import quantities
from elasticdl.job.spec import JobSpec
from elasticdl.kube import names
from elasticdl.kube.names import KUEUE_GROUP_LABEL

# The group in which Kueue admits the workers of a gang together: its size, and its end.
#
# Kueue deletes a pod beyond the size, and counts one that leaves until it is over. A pod that has failed is kept, and so is the quota of
# the whole group, until another takes its place, or the group is said to be over: a pod of it says that it is not to be tried again.


SIZE = "kueue.x-k8s.io/pod-group-total-count"
# Kueue may take a pod off the books whose node is lost: what runs on there is no member of any later world.
ANNOTATIONS: Mapping[str, str] = {"kueue.x-k8s.io/safe-to-forcefully-delete": "true"}
_RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
_FINALIZER = "kueue.x-k8s.io/managed"
# A change of a pod, by which its group is over when none of its pods runs any more.
OVER: Mapping[str, Any] = {"metadata": {"annotations": {_RETRIABLE: "false"}}}


def is_running(pod: Mapping[str, Any] | None) -> bool:
    return bool(pod and (pod.get("status") or {}).get("phase") == "Running" and not is_deleted(pod))


def is_over(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def is_deleted(made: Mapping[str, Any]) -> bool:
    """Whether it is about to be gone."""
    return bool(made["metadata"].get("deletionTimestamp"))


def size_of(pod: Mapping[str, Any]) -> int | None:
    """Of the pod's group; None if it is in none."""
    metadata = pod["metadata"]
    size = (metadata.get("annotations") or {}).get(SIZE)
    return int(size) if size and KUEUE_GROUP_LABEL in metadata["labels"] else None


def is_kept(pod: Mapping[str, Any]) -> bool:
    """Whether Kueue would keep a pod of a group, were it to fail."""
    metadata = pod["metadata"]
    said = (metadata.get("annotations") or {}).get(_RETRIABLE)
    grouped = KUEUE_GROUP_LABEL in (metadata.get("labels") or {})
    return grouped and said != "false" and _FINALIZER in (metadata.get("finalizers") or ())


# Merging a part of a manifest into another, a subset of Kubernetes' strategic merge; the user's templates are such parts.
#
# | in the patch | what becomes of it |
# | --- | --- |
# | a mapping | merged key by key |
# | null | takes the key away |
# | containers, init containers, image pull secrets | merged element by element, by `name` |
# | variables (`env`), volumes | an element takes the place of the one with its `name` |
# | volume mounts, volume devices, ports, host aliases | by `mountPath`, `devicePath`, `containerPort`, `ip` |
# | tolerations, topology spread constraints, finalizers, owner references | added to those there are |
# | anything else, other lists too (commands, node selector terms) | takes the place of what was there |
#
# Directives (`$patch`, `$retainKeys`) are refused.


Manifest = dict[str, Any]
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
}
# A variable has one value and a volume one source: what is said of it anew takes the place of all that was said before.
_WHOLE = ("env", "volumes")
_APPENDED = ("tolerations", "topologySpreadConstraints", "finalizers", "ownerReferences")
_PARTS = ("apiVersion", "kind", "metadata", "spec")  # of a pod
_ACCOUNT = ("serviceAccountName", "serviceAccount")


def merge(base: Mapping[str, Any], patch: Mapping[str, Any], where: str = "") -> Manifest:
    """``base`` with ``patch`` merged into it; neither is changed.

    Raises:
        ValueError: one line about what can't be merged, and where.
    """
    merged = dict(base)
    for key, value in patch.items():
        place = f"{where}.{key}" if where else key
        if str(key).startswith("$"):
            raise ValueError(f"{place}: directives are not understood; leave it out")
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_value(key, base.get(key), value, place)
    return merged


def _merge_value(key: str, base: Any, value: Any, place: str) -> Any:
    if key in _KEYS or key in _APPENDED:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{place} must be a list, not {value!r}")
        there = base or []
        return _merge_by_key(there, value, _KEYS[key], place) if key in _KEYS else [*there, *value]
    if isinstance(value, Mapping):
        return merge(base if isinstance(base, Mapping) else {}, value, place)
    if isinstance(base, Mapping):
        raise ValueError(f"{place} must be a mapping, not {value!r}")
    return value


def _merge_by_key(base: Sequence[Any], patch: Sequence[Any], key: str, place: str) -> list[Any]:
    merged = {element[key]: element for element in base}
    for index, element in enumerate(patch):
        where = f"{place}[{index}]"
        if not isinstance(element, Mapping) or key not in element:
            raise ValueError(f"{where} must be a mapping with {key}")
        whole = place.rpartition(".")[2] in _WHOLE
        merged[element[key]] = merge({} if whole else merged.get(element[key], {}), element, where)
    return list(merged.values())


def with_pod_templates(pod: Manifest, spec: JobSpec, role: Role) -> Manifest:
    """A role's pod with the user's templates merged into it, its own after the one for all pods.

    Raises:
        UserError: one can't be read, is not YAML, or is no part of such a pod.
    """
    own = f"{role}_pod_template"
    for option, path in (("pod_template", spec.pod_template), (own, getattr(spec, own))):
        source = f"--{option} {path}"
        template = _read(source, path) if path else {}
        if role is Role.MASTER and option == own and any(key in template.get("spec", {}) for key in _ACCOUNT):
            raise UserError(f"{source}: name the master's account with --service_account, and leave it out here")
        try:
            pod = merge(pod, template)
        except ValueError as error:
            raise UserError(f"{source}: {error}") from None
        if path and role is Role.MASTER and len(pod["spec"].get("containers", ())) > 1:
            beside = "a container beside the master's would keep the Job from ending: make it an init container with"
            raise UserError(f"{source}: {beside} restartPolicy: Always, or give it with --worker_pod_template")
    return pod


def _read(source: str, path: str) -> Manifest:
    """Metadata and spec, as far as the user gives them."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{source} is not YAML: {flat(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{source} must be a mapping with metadata and spec, as in a pod")
    for key in content:
        if key not in _PARTS:
            raise UserError(f"{source}: {key} is no part of a pod; put it below metadata or spec")
    for key in ("metadata", "spec"):
        if not isinstance(content.get(key, {}), dict):
            raise UserError(f"{source}: {key} must be a mapping")
    if content.get("spec", {}).get("restartPolicy", "Never") != "Never":
        raise UserError(f"{source}: spec.restartPolicy must be Never: the master itself replaces workers")
    if "name" in content.get("metadata", {}):
        raise UserError(f"{source}: metadata.name must be left out, as each pod has a name of its own")
    return {key: content[key] for key in ("metadata", "spec") if key in content}


# Manifests as YAML that `kubectl` reads as what they are.


# Words and numbers for readers of YAML 1.1 or 1.2, not all of which PyYAML takes for such: a job may be named y.
_AMBIGUOUS = re.compile(r"[-+.\d].*|y|n|yes|no|on|off|true|false|null|~", re.IGNORECASE | re.DOTALL)


class _Dumper(yaml.SafeDumper):
    """It writes the same mapping out twice, where others would refer to it."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def as_yaml(manifests: Iterable[Manifest]) -> str:
    text: str = yaml.dump_all(list(manifests), Dumper=_Dumper, sort_keys=False)
    return text


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


def master_template(spec: JobSpec, worker: Manifest) -> Manifest:
    """The master's pod, as the user's templates leave it, beside such pods for workers.

    Raises:
        UserError: a template is wrong.
    """
    made = with_pod_templates(master_pod(spec), spec, Role.MASTER)
    # An account that a template names for all pods is the workers': the master has to have its own.
    made = merge(made, {"spec": {"serviceAccount": None, **_identity(spec)}})
    # It has the class that a template gives the workers' alone, if it has none itself.
    name = worker["spec"].get("priorityClassName")
    made = merge({"spec": {"priorityClassName": name}}, made) if name else made
    return finish_pod(made, spec, Role.MASTER)


def worker_template(spec: JobSpec, namespace: str) -> Manifest:
    """As `master_template`, for workers."""
    made = with_pod_templates(worker_pod(spec, namespace), spec, Role.WORKER)
    return finish_pod(made, spec, Role.WORKER)


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
        each = quantities.processors(processors) / spec.processes_per_worker
        env.append(_variable("OMP_NUM_THREADS", str(math.ceil(each))))
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
        return {"labels": grouped, "annotations": {**ANNOTATIONS, SIZE: size}}, {}
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
    return {"metadata": dict(metadata or {}), "spec": made}


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


# The objects around the pods.


# Masters that may fail. One that works is not counted (`judge.TRACKING`). A crash is tried again after up to six minutes. A
# master that crashes again and again, or whose job is over, sets this to 0 itself; so the bound is for those that never get
# so far, as in an image without this package.
BACKOFF_LIMIT = 100
_POD_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "watch")


@dataclass(frozen=True, slots=True)
class ManifestInputs:
    """What the objects are made from. Pods are as the user's templates left them."""

    spec: JobSpec
    namespace: str
    master: Manifest  # pod: metadata and spec
    worker: Manifest
    certificates: Mapping[Role, TlsFiles]
    # Whether the cluster knows Volcano's groups.
    groups: bool = True


def make_job(parts: ManifestInputs, *, submitted: bool = False) -> Manifest:
    """``submitted``: it is made first and starts nothing yet, and is to own all the rest, which goes with it after its end.

    What somebody applies from a file has no owner: if the Job went by itself, the rest would stay, and whoever keeps the
    cluster as the file says would start the Job again.
    """
    ttl = {"ttlSecondsAfterFinished": parts.spec.ttl} if submitted and parts.spec.ttl else {}
    spec = {
        "parallelism": 0 if submitted else 1,
        **ttl,
        "completions": 1,
        "backoffLimit": BACKOFF_LIMIT,
        "template": parts.master,
    }
    return {**_head(parts, "Job", names.master_name(parts.spec.job_name), "batch/v1"), "spec": spec}


def companions(parts: ManifestInputs) -> list[Manifest]:
    """Everything but the Job, in the order in which it is to be made."""
    spec, job = parts.spec, parts.spec.job_name
    made = [] if spec.service_account else _account(parts)
    for role, files in parts.certificates.items():
        made.append(_secret(parts, names.tls_name(job, role), "kubernetes.io/tls", files.to_mapping()))
    if spec.envs:  # more people may look at config maps and pods than at Secrets, and a variable may be a password
        content = {name: value.encode() for name, value in quantities.parse_envs(spec.envs).items()}
        made.append(_secret(parts, names.environment_name(job), "Opaque", content))
    without_envs = spec.model_copy(update={"envs": ""})
    data = {SPEC_FILE: without_envs.to_json(), TEMPLATE_FILE: json.dumps(parts.worker, indent=1)}
    made.append({**_head(parts, "ConfigMap", names.spec_name(job)), "immutable": True, "data": data})
    made.append(_head(parts, "ConfigMap", names.state_name(job)))
    if parts.groups and (group := volcano_group(spec, parts.worker)):
        head = _head(parts, "PodGroup", names.group_name(job), "scheduling.volcano.sh/v1beta1")
        made.append({**head, "spec": group})
    # Only the job's own pods come in, but for the metrics. A port-forward comes from the pod's node, which no policy keeps
    # out. Metrics may be collected from any namespace; the certificate decides who gets them.
    own = {"matchLabels": {names.JOB_LABEL: job}}
    master = {"matchLabels": {names.JOB_LABEL: job, names.ROLE_LABEL: str(Role.MASTER)}}
    port = {"protocol": "TCP", "port": names.METRICS_PORT}
    made.append(_policy(parts, job, own, {"from": [{"podSelector": own}]}))
    anybody = {"from": [{"namespaceSelector": {}}], "ports": [port]}
    # With a dot, which no job's name has: no other job's policy has this name.
    made.append(_policy(parts, f"{job}.metrics", master, anybody))
    made.append(_service(parts))
    return made


def owned(manifest: Manifest, job: Manifest) -> Manifest:
    """The same object as a part of the Job, which the server has made."""
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [names.job_reference(job)]}}


def pod_of(parts: ManifestInputs, pod: Manifest, role: Role) -> Manifest:
    """A whole pod, to ask the cluster whether it would take it."""
    metadata = {**pod["metadata"], "namespace": parts.namespace, "generateName": f"{parts.spec.job_name}-{role}-"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}


def rules(job: str) -> list[Manifest]:
    """All that the master may do. Pods can't be listed by name, as their names are not known beforehand."""
    return [
        _rule("", "pods", list(_POD_VERBS)),
        _rule("", "events", ["list"]),
        _rule("", "configmaps", ["get", "patch"], names.state_name(job)),
        _rule("batch", "jobs", ["get", "patch"], names.master_name(job)),
    ]


def _rule(group: str, resource: str, verbs: list[str], *only: str) -> Manifest:
    made: Manifest = {"apiGroups": [group], "resources": [resource], "verbs": verbs}
    return {**made, "resourceNames": list(only)} if only else made


def _account(parts: ManifestInputs) -> list[Manifest]:
    name, group = names.master_name(parts.spec.job_name), "rbac.authorization.k8s.io"
    role = {**_head(parts, "Role", name, f"{group}/v1"), "rules": rules(parts.spec.job_name)}
    binding = {
        **_head(parts, "RoleBinding", name, f"{group}/v1"),
        "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": parts.namespace}],
    }
    # The token is mounted into the master's pod only.
    account = {**_head(parts, "ServiceAccount", name), "automountServiceAccountToken": False}
    return [account, role, binding]


def _secret(parts: ManifestInputs, name: str, kind: str, content: Mapping[str, bytes]) -> Manifest:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    # Immutable: the keys of another rendering of the same job must not take the place of those that its pods use.
    return {**_head(parts, "Secret", name), "type": kind, "immutable": True, "data": data}


def _service(parts: ManifestInputs) -> Manifest:
    """The name by which workers find the master. It is headless, and does not wait for readiness."""
    made, job = _head(parts, "Service", names.master_name(parts.spec.job_name)), parts.spec.job_name
    made["metadata"]["labels"] = names.labels(job, Role.MASTER)
    ports = [
        {"name": name, "protocol": "TCP", "port": port, "targetPort": port}
        for name, port in (("grpc", names.MASTER_PORT), ("metrics", names.METRICS_PORT))
    ]
    selector = {names.JOB_LABEL: job, names.ROLE_LABEL: str(Role.MASTER)}
    return {
        **made,
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports},
    }


def _policy(parts: ManifestInputs, name: str, pods: Manifest, ingress: Manifest) -> Manifest:
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [ingress]}
    return {**_head(parts, "NetworkPolicy", name, "networking.k8s.io/v1"), "spec": spec}


def _head(parts: ManifestInputs, kind: str, name: str, version: str = "v1") -> Manifest:
    labels = {names.APPLICATION_LABEL: names.APPLICATION, names.JOB_LABEL: parts.spec.job_name}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "namespace": parts.namespace, "labels": labels},
    }
