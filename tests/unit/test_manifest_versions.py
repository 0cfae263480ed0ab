"""From which Kubernetes on what a job makes is valid: by each release's own schemas, which refuse fields unknown to it."""

import functools
import json
from importlib.resources import files

import pytest
import yaml
from jsonschema.validators import Draft202012Validator
from kubernetes_kit import PODS
from kubernetes_validate.utils import all_versions
from referencing import Registry, Resource

from elasticdl.cli.__main__ import main
from elasticdl.job.quantities import parse_priority
from elasticdl.kube.manifests import TEMPLATE_FILE, owned
from elasticdl.kube.names import spec_name
from elasticdl.places.worker_pods import WorkerPods, owner_references

OLDEST, NEWEST = 26, 37
MADE = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "digits-master", "uid": "job-uid"}}
OPTIONS = [
    *("train", "--image", "i", "--job_name", "digits", "--model_def", "m", "--num_workers", "2-4"),
    *("--worker_resource_request", "cpu=4,memory=8Gi,gpu=1", "--volume", "claim_name=data,mount_path=/data"),
    *("--envs", "A=1", "--env_from_secret", "aws,TOKEN=hub/token", "--queue", "kueue=lab"),
]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    """Those of `elasticdl train --yaml`, as they are and as parts of the Job, and a worker's pod."""
    file = tmp_path_factory.mktemp("job") / "job.yaml"
    assert main([*OPTIONS, "--yaml", str(file)]) == 0
    written = list(yaml.safe_load_all(file.read_text()))
    (template,) = (each["data"][TEMPLATE_FILE] for each in written if each["metadata"]["name"] == spec_name("digits"))
    state = {"metadata": {"name": "digits-state", "uid": "state-uid", "ownerReferences": [{"uid": "job-uid"}]}}
    owners, limits, priority = owner_references(MADE, state), PODS.limits, parse_priority("high=0.5")
    pods = WorkerPods("digits", "lab", owners, json.loads(template), limits, priority)
    parts = [owned(each, MADE) for each in written if each["kind"] != "Job"]
    return [*written, *parts, pods.manifest(0, 0, away_from=("n1", "n2"))]


@functools.cache
def resource(version, name):
    file = files("kubernetes_validate") / f"kubernetes-json-schema/v{version}-local-strict/{name}.json"
    return Resource.from_contents(json.loads(file.read_text()))


def faults(version, manifest):
    group, _, release = manifest["apiVersion"].rpartition("/")
    schema = resource(version, "-".join([manifest["kind"].lower(), *([group.split(".")[0]] if group else []), release]))
    registry = resource(version, "_definitions") @ Registry()
    found = Draft202012Validator(schema.contents, registry=registry).iter_errors(manifest)
    return [f"{manifest['kind']}: {'.'.join(map(str, fault.path))}: {fault.message}" for fault in found]


def test_the_manifests_are_valid_from_the_oldest_to_the_newest_release(manifests):
    kinds = {each["kind"] for each in manifests}
    access, rest = {"Secret", "NetworkPolicy", "Role", "RoleBinding"}, {"Service", "ConfigMap"}
    assert kinds >= {"Job", "Pod", *access, *rest}
    known = {int(version.split(".")[1]): version for version in all_versions()}
    assert known.keys() >= set(range(OLDEST, NEWEST + 1))
    for minor in range(OLDEST, NEWEST + 1):
        assert [fault for each in manifests for fault in faults(known[minor], each)] == [], f"1.{minor}"
    assert faults(known[OLDEST], {**manifests[0], "newer": 1}) != [], "a field that a release does not know is a fault"
