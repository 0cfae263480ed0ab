"""Whom a job's pods are to a real API server, and what they may do there: what the Role says, and nothing else."""

import itertools
from urllib.parse import urlsplit

import pytest
from cluster_users import JOB, authority_of, parts_of_job, token_of, write_kubeconfig
from kubernetes import client, config

from elasticdl.cli.cluster_run import Submission
from elasticdl.common.credentials import Role
from elasticdl.common.errors import UserError
from elasticdl.kube import kubeconfig, manifests
from elasticdl.kube.client import connect
from elasticdl.kube.kubeconfig import ClusterTarget

pytest_plugins = ["tests.cluster.fixtures"]

MASTER = "digits-master"


@pytest.fixture
def parts(place):
    """Those of a job that is there, with a master that does not get to run."""
    parts = parts_of_job(place, "missing/image")
    Submission(place, parts, print).make()
    return parts


@pytest.fixture
def in_the_masters_pod(cluster, place, parts, tmp_path, monkeypatch):
    """What the master's process finds there: its token where Kubernetes mounts it, and where the cluster is; no kubeconfig."""
    files = {"token": token_of(cluster, place.namespace, MASTER).encode(), "ca.crt": authority_of(cluster)}
    for name, content in {**files, "namespace": place.namespace.encode()}.items():
        (tmp_path / name).write_bytes(content)
    server = urlsplit(place.server)
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(server.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port or 443))
    monkeypatch.setattr(config.incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(config.incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(kubeconfig, "ACCOUNT", tmp_path)


@pytest.fixture
def master(in_the_masters_pod, place):
    return connect(ClusterTarget(place.namespace), own_account=True)


def allowed(api, namespace):
    """All that whoever asks may do there."""
    review = {"spec": {"namespace": namespace}}
    may = client.AuthorizationV1Api(api).create_self_subject_rules_review(review).status
    assert may.incomplete is False
    given = ((each.verbs, each.api_groups, each.resources, each.resource_names or [""]) for each in may.resource_rules)
    return {each for rule in given for each in itertools.product(*rule)}


def test_the_masters_account_may_do_what_its_role_says_and_nothing_else(cluster, master, place, tmp_path):
    parts = ("verbs", "apiGroups", "resources", "resourceNames")
    rules = ([rule.get(part, [""]) for part in parts] for rule in manifests.rules(JOB))
    said = {each for rule in rules for each in itertools.product(*rule)}
    # An account without a role may ask who it is and what it may do, and on newer clusters list the trust bundles.
    someone = write_kubeconfig(cluster, place.namespace, "default", tmp_path / "someone")
    anybody = allowed(config.new_client_from_config(str(someone)), place.namespace)
    assert said & anybody == set()
    assert allowed(master.api, place.namespace) == said | anybody


def test_a_command_within_a_pod_uses_the_pods_own_account(in_the_masters_pod, place):
    here = connect(ClusterTarget())
    assert (here.namespace, urlsplit(here.server).port) == (place.namespace, urlsplit(place.server).port)
    assert here.read("Job", MASTER)["metadata"]["name"] == MASTER
    with pytest.raises(UserError, match=f"you may not list secrets in namespace {place.namespace}: .*cannot list"):
        here.list("Secret")


def test_only_the_masters_pod_has_a_token(cluster, place, parts):
    """As the API server itself completes them."""
    core = client.CoreV1Api(cluster.client())
    for pod, role in ((parts.master, Role.MASTER), (parts.worker, Role.WORKER)):
        made = core.create_namespaced_pod(place.namespace, manifests.pod_of(parts, pod, role), dry_run="All")
        mounts = [each.mount_path for container in made.spec.containers for each in container.volume_mounts]
        assert any("serviceaccount" in path for path in mounts) == (role is Role.MASTER)
