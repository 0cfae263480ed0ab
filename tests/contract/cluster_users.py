"""What is there of a job, and people of a cluster, as RBAC knows them: a service account of a namespace each, with what it may do."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from pathlib import Path

import yaml
from kubernetes import client

from elasticdl.cli.cluster_run import make_parts
from elasticdl.job.spec import JobSpec
from tests.waiting import wait_until

JOB = "digits"
KINDS = ("Job", "Service", "ServiceAccount", "Role", "RoleBinding", "Secret", "ConfigMap", "NetworkPolicy")


def parts_of_job(place, image="local/host", **options):
    spec = JobSpec.model_validate({"image": image, "job_name": JOB, "model_def": "m", **options})
    return make_parts(spec, place.namespace, datetime.now(UTC))


def objects_of_job(place):
    """What is there of the job, by kind and name, apart from its pods, which come and go with the rest."""
    mine = f"elasticdl.org/job={JOB}"
    return {(kind, each["metadata"]["name"]) for kind in KINDS for each in place.list(kind, label_selector=mine)}


def until_there_is(place, expected=frozenset()):
    """Wait until a Job that was deleted has taken with it what it owned, and only this is left of the job."""
    wait_until(lambda: objects_of_job(place) == set(expected), lambda: objects_of_job(place))


def add_user(cluster, namespace, name, role):
    """With one of the roles that every cluster has."""
    api = cluster.client()
    client.CoreV1Api(api).create_namespaced_service_account(namespace, {"metadata": {"name": name}})
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    binding = {"metadata": {"name": name}, "roleRef": reference, "subjects": subjects}
    client.RbacAuthorizationV1Api(api).create_namespaced_role_binding(namespace, binding)


def token_of(cluster, namespace, account):
    core = client.CoreV1Api(cluster.client())
    return core.create_namespaced_service_account_token(account, namespace, {"spec": {"audiences": []}}).status.token


def write_kubeconfig(cluster, namespace, account, path):
    """The administrator's, with another user and namespace."""
    content = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    current = content["current-context"]
    (context,) = (each["context"] for each in content["contexts"] if each["name"] == current)
    context.update(user=account, namespace=namespace)
    content["users"] = [{"name": account, "user": {"token": token_of(cluster, namespace, account)}}]
    path.write_text(yaml.safe_dump(content))
    return path


def authority_of(cluster):
    """The certificate of the cluster's authority, PEM."""
    content = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    current = next(each["context"] for each in content["contexts"] if each["name"] == content["current-context"])
    found = next(each["cluster"] for each in content["clusters"] if each["name"] == current["cluster"])
    if "certificate-authority-data" in found:
        return base64.b64decode(found["certificate-authority-data"])
    return Path(cluster.kubeconfig).parent.joinpath(found["certificate-authority"]).read_bytes()
