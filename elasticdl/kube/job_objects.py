"""What a job on a cluster consists of before any worker is there: pure manifests.

The Job keeps one master pod alive, and owns the rest: whoever deletes it deletes all.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass

from elasticdl.common.credentials import Role, TlsFiles
from elasticdl.job.quantities import parse_envs
from elasticdl.job.spec import JobSpec
from elasticdl.kube import names
from elasticdl.kube.pod import SPEC_FILE, TEMPLATE_FILE, Manifest, volcano_group

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
        content = {name: value.encode() for name, value in parse_envs(spec.envs).items()}
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
