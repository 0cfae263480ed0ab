"""Submitting a job to a real API server: all of its objects, or none."""

import os
import shutil
import subprocess

import pytest
import yaml
from cluster_users import KINDS, objects_of_job, parts_of_job, until_there_is
from kubernetes import client

from elasticdl.cli.cluster_run import Submission
from elasticdl.common.errors import UserError
from elasticdl.kube import manifests
from elasticdl.kube.client import connect
from elasticdl.kube.kubeconfig import ClusterTarget
from tests.cluster.build import CLUSTER
from tests.cluster.kit import until

pytest_plugins = ["tests.cluster.fixtures"]


def submission(place, said=None, **options):
    return Submission(place, parts_of_job(place, **options), [].append if said is None else said.append)


def test_everything_is_made_and_goes_with_the_job(place, cluster, namespace):
    submitted = submission(place)
    submitted.check()
    assert objects_of_job(place) == set()
    submitted.make()
    master = ("Job", "Service", "ServiceAccount", "Role", "RoleBinding")
    assert objects_of_job(place) == {
        *((kind, "digits-master") for kind in master),
        *(("Secret", f"digits-{role}-tls") for role in ("master", "worker", "owner", "metrics")),
        *(("ConfigMap", f"digits-{name}") for name in ("spec", "state")),
        *(("NetworkPolicy", name) for name in ("digits", "digits.metrics")),
    }
    uid = place.read("Job", "digits-master")["metadata"]["uid"]
    for kind in set(KINDS) - {"Job"}:
        for each in place.list(kind, label_selector="elasticdl.org/job=digits"):
            (owner,) = each["metadata"]["ownerReferences"]
            assert owner["uid"] == uid, each["metadata"]["name"]
    core = client.CoreV1Api(cluster.client())
    (pod,) = until(lambda pods: list(pods.values()), "the master's pod", core.list_namespaced_pod, namespace)
    borne = {each.key: each.toleration_seconds for each in pod.spec.tolerations}
    assert borne == {"node.kubernetes.io/not-ready": 10, "node.kubernetes.io/unreachable": 10}
    assert place.delete("Job", "digits-master")
    until(lambda pods: not pods, "no pod", core.list_namespaced_pod, namespace)
    until_there_is(place)


def test_another_rendering_leaves_the_keys_of_a_running_job_alone(place, cluster, tmp_path):
    """As GitOps does it: every rendering has keys of its own, and is applied over the last one."""
    kubectl = shutil.which("kubectl", path=f"{CLUSTER.folder()}{os.pathsep}{os.environ['PATH']}")
    if kubectl is None:
        pytest.skip("there is no kubectl")
    applied = []
    for number in range(2):
        made = submission(place, envs=f"RENDERING={number}").parts
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump_all([*manifests.companions(made), manifests.make_job(made)]))
        command = [kubectl, "--kubeconfig", str(cluster.kubeconfig), "apply", "-f", str(file)]
        applied.append(subprocess.run(command, capture_output=True, text=True, check=False, timeout=60))
        if not number:
            first = {each["metadata"]["name"]: each["data"] for each in place.list("Secret")}
    assert (applied[0].returncode, applied[0].stderr) == (0, "")
    assert applied[1].returncode == 1
    said = applied[1].stderr
    assert said.count("data: Forbidden: field is immutable when `immutable` is set") == 5, said
    used = [value for content in first.values() for value in content.values() if len(value) > 100]
    assert not [value for value in used if value in said], "kubectl shows keys, which must not be those in use"
    assert {each["metadata"]["name"]: each["data"] for each in place.list("Secret")} == first


def test_a_restricted_namespace_takes_a_job_but_no_folder_of_a_node(place, cluster):
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    client.CoreV1Api(cluster.client()).patch_namespace(place.namespace, {"metadata": {"labels": labels}})
    submission(place).check()
    with pytest.raises(UserError, match=r"the cluster refuses the .* pod: violates PodSecurity .*restricted.*hostPath"):
        submission(place, volume="host_path=/etc,mount_path=/x").check()


def test_a_name_that_exists_and_what_was_made_before_something_fails_half_way(place):
    made, said = submission(place), []
    service = place.create(manifests.companions(made.parts)[-1])
    with pytest.raises(UserError, match="there is a Service digits-master in namespace"):
        submission(place, said).make()
    until_there_is(place, {("Service", "digits-master")})
    assert said == []
    place.delete("Service", service["metadata"]["name"])
    made.make()
    before = objects_of_job(place)
    line = f"there is a job named digits in namespace {place.namespace} already: choose another --job_name, "
    for attempt in (submission(place).check, submission(place).make):
        with pytest.raises(UserError, match=line):
            attempt()
    assert objects_of_job(place) == before


def test_a_quota_that_has_no_room(place, cluster):
    core, said = client.CoreV1Api(cluster.client()), []

    def limit(**hard):
        quota = {"metadata": {"name": "small"}, "spec": {"hard": hard}}
        core.create_namespaced_resource_quota(place.namespace, quota)
        until(lambda found: found["small"].status.hard, "quota", core.list_namespaced_resource_quota, place.namespace)

    limit(**{"requests.cpu": "500m"})
    submission(place, said).check()
    line = "no worker has a place in the namespace's quota: the cluster refuses the worker's pod: exceeded"
    assert [line in each for each in said] == [True], "a warning: others may leave"
    core.delete_namespaced_resource_quota("small", place.namespace)
    limit(pods="0")
    with pytest.raises(UserError, match="the cluster refuses the master's pod: exceeded quota: small"):
        submission(place).check()
    assert objects_of_job(place) == set()


def test_where_there_is_no_such_namespace(place):
    with pytest.raises(UserError, match="there is no namespace nowhere in the cluster at https"):
        submission(connect(ClusterTarget("nowhere"))).check()
