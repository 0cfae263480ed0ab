"""The test cluster behaves as Kubernetes does, as far as the framework relies on it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kubernetes import client

from tests.cluster.kit import container, is_running, shell

pytest_plugins = ["tests.cluster.fixtures"]

FOREVER = "while :; do sleep 0.1; done"
PRIORITIES = {"cluster-test-low": 100, "cluster-test-high": 100_000}


@pytest.fixture(scope="module")
def priorities(cluster):
    scheduling = client.SchedulingV1Api(cluster.client())
    for name, value in PRIORITIES.items():
        scheduling.create_priority_class({"metadata": {"name": name}, "value": value})
    yield tuple(PRIORITIES)
    for name in PRIORITIES:
        scheduling.delete_priority_class(name)


def waiting_reason(pod):
    statuses = pod.status.container_statuses or []
    return statuses[0].state.waiting.reason if statuses and statuses[0].state.waiting else None


def condition(of, kind):
    return next((each for each in of.status.conditions or [] if each.type == kind), None)


def file_within(seconds, path):
    """The content of a file that a pod is about to write."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)
    return path.read_text().strip()


def ends_within(seconds, pid):
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


# How a container ends


def test_exit_status_and_log_of_a_container_are_told(pods):
    pods.create("good", shell("echo said; exit 0"))
    pods.create("bad", shell("echo wrong >&2; exit 3"))
    good, bad = pods.ended("good"), pods.ended("bad")
    assert (good.status.phase, bad.status.phase) == ("Succeeded", "Failed")
    assert (container(good).state.terminated.exit_code, container(good).state.terminated.reason) == (0, "Completed")
    assert (container(bad).state.terminated.exit_code, container(bad).state.terminated.reason) == (3, "Error")
    assert (pods.log("good"), pods.log("bad")) == ("said\n", "wrong\n")


def test_a_killed_container_has_exit_status_137_and_leaves_no_process(own_cluster, pods, tmp_path):
    # setsid takes the second process out of the session and the process group of the first.
    script = f"setsid sleep 1000 & echo $! > {tmp_path}/orphan; echo $BASHPID > {tmp_path}/main; wait"
    pods.create("killed", shell(script))
    os.kill(int(file_within(20, tmp_path / "main")), signal.SIGKILL)
    ended = container(pods.ended("killed")).state.terminated
    assert (ended.exit_code, ended.reason) == (137, "Error")
    ends_within(5, file_within(5, tmp_path / "orphan"))


def test_a_program_that_does_not_exist_fails_the_pod(own_cluster, pods):
    pods.create("nothing", {"command": ["no-such-program"]})
    ended = container(pods.ended("nothing")).state.terminated
    assert (ended.exit_code, ended.reason) == (128, "StartError")
    assert "no-such-program" in ended.message


# How a pod is deleted


def test_deletion_sends_sigterm_and_tells_the_exit_status(pods):
    seen = []
    pods.create("polite", shell(f"trap 'echo leaving; exit 7' TERM; echo ready; {FOREVER}"))
    pods.said("polite", "ready")
    pods.delete("polite", grace_period_seconds=30)

    def remember(pods_now):
        if "polite" in pods_now and container(pods_now["polite"]).state.terminated:
            seen.append(container(pods_now["polite"]).state.terminated.exit_code)
        return "polite" not in pods_now

    pods.until(remember, "polite gone")
    assert set(seen) <= {7}  # the status may be merged with the deletion on its way here
    assert pods.events("Killing") == ["polite"]


@pytest.mark.parametrize("grace", [1, 0])
def test_a_deaf_pod_is_killed_when_its_grace_is_over(own_cluster, pods, tmp_path, grace):
    pods.create("deaf", shell(f"trap '' TERM; echo $BASHPID > {tmp_path}/pid; {FOREVER}"))
    pid = file_within(20, tmp_path / "pid")
    pods.delete("deaf", grace_period_seconds=grace)
    pods.gone("deaf")
    ends_within(10, pid)


# Placement


def test_gpus_are_handed_out_once_and_preempted_by_priority(own_cluster, pods, priorities):
    low, high = priorities
    worker = shell(f"trap 'echo checkpoint; exit 0' TERM; echo gpus=$NVIDIA_VISIBLE_DEVICES; {FOREVER}")
    for number in range(8):
        pods.create(f"low-{number}", worker, gpus=1, priorityClassName=low)
    running = pods.until(
        lambda seen: (found := [each for each in seen.values() if is_running(each)]) and len(found) == 6 and found,
        "six pods on six GPUs",
    )
    for pod in running:
        pods.said(pod.metadata.name, "gpus=")
    held = sorted((pod.spec.node_name, pods.log(pod.metadata.name).strip()) for pod in running)
    assert held == [(node, f"gpus={device}") for node in ("n0", "n1") for device in range(3)]

    def refused(seen):
        told = [condition(each, "PodScheduled") for each in seen.values() if each.status.phase == "Pending"]
        return [each.message for each in told if each and each.reason == "Unschedulable"]

    messages = pods.until(lambda seen: len(refused(seen)) == 2 and refused(seen), "two pods without a place")
    assert all("Insufficient nvidia.com/gpu" in message for message in messages)

    pods.create("high", worker, gpus=2, priorityClassName=high)
    pods.running("high")
    victims = pods.events("Preempted")
    assert (len(victims), set(victims) < {pod.metadata.name for pod in running}) == (2, True)
    for victim in victims:
        logs = (own_cluster.logs / "pods").glob(f"{pods.namespace}_{victim}_*/main.log")
        assert [path.read_text().splitlines()[1:] for path in logs] == [["checkpoint"]]


# What a container is given


def test_environment_from_values_fields_secrets_and_config_maps(pods):
    pods.core.create_namespaced_secret(pods.namespace, {"metadata": {"name": "key"}, "stringData": {"token": "s3"}})
    pods.core.create_namespaced_config_map(pods.namespace, {"metadata": {"name": "map"}, "data": {"a": "1", "b": "2"}})
    env = [
        {"name": "PLAIN", "value": "text"},
        {"name": "BUILT", "value": "$(PLAIN)-$(NOWHERE)-$$(PLAIN)"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "key", "key": "token"}}},
        {"name": "LETTER", "valueFrom": {"configMapKeyRef": {"name": "map", "key": "b"}}},
        {"name": "ABSENT", "valueFrom": {"configMapKeyRef": {"name": "map", "key": "z", "optional": True}}},
        {"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    source = [{"prefix": "MAP_", "configMapRef": {"name": "map"}}]
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    pods.create("env", {"command": ["python3", "-c", script], "env": env, "envFrom": source})
    pod = pods.ended("env")
    seen = json.loads(pods.log("env"))
    expected = {"PLAIN": "text", "BUILT": "text-$(NOWHERE)-$(PLAIN)", "TOKEN": "s3", "LETTER": "2", "ME": "env"}
    expected |= {"MAP_a": "1", "MAP_b": "2", "HOSTNAME": "env", "ADDRESS": pod.status.pod_ip}
    assert {name: seen.get(name) for name in expected} == expected
    assert "ABSENT" not in seen


def test_volumes_are_found_where_command_and_environment_say(pods):
    pods.core.create_namespaced_secret(pods.namespace, {"metadata": {"name": "key"}, "stringData": {"token": "s3"}})
    pods.core.create_namespaced_config_map(pods.namespace, {"metadata": {"name": "map"}, "data": {"a": "1", "b": "2"}})
    token = {"serviceAccountToken": {"path": "token", "audience": "test", "expirationSeconds": 600}}
    labels = {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}
    volumes = [
        {"name": "secret", "secret": {"secretName": "key", "defaultMode": 0o444}},
        {"name": "map", "configMap": {"name": "map", "items": [{"key": "b", "path": "deep/letter"}]}},
        {"name": "all", "projected": {"sources": [token, {"downwardAPI": labels}, {"configMap": {"name": "map"}}]}},
        {"name": "empty", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": each["name"], "mountPath": f"/etc/job/{each['name']}"} for each in volumes]
    script = (
        "cat /etc/job/secret/token /etc/job/map/deep/letter /etc/job/all/name /etc/job/all/a; cat $PLACE/b; "
        "echo; cut -d. -f1 /etc/job/all/token | tr _- /+ | base64 -d 2>/dev/null; touch /etc/job/empty/file"
    )
    env = [{"name": "PLACE", "value": "/etc/job/all"}]
    pods.create("files", {**shell(script), "env": env, "volumeMounts": mounts}, volumes=volumes)
    assert pods.ended("files").status.phase == "Succeeded", pods.log("files")
    words, header = pods.log("files").splitlines()
    assert words == "s32files12"
    assert '"alg"' in header


# What goes wrong


def test_an_image_that_cannot_be_pulled(pods):
    pods.create("imageless", {**shell("true"), "image": "missing/image:1"})
    pods.wait("imageless", lambda pod: waiting_reason(pod) in ("ErrImagePull", "ImagePullBackOff"), "pull failed")
    pod = pods.wait("imageless", lambda pod: waiting_reason(pod) == "ImagePullBackOff", "pull held back")
    assert pod.status.phase == "Pending"
    assert "missing/image:1" in container(pod).state.waiting.message
    pods.delete("imageless")
    pods.gone("imageless")


# What is left


def test_nothing_outlives_the_process_that_holds_the_leash(tmp_path):
    script = (
        "import pathlib, sys, time; from tests.cluster.processes import Leashed;"
        "Leashed.start(['bash', '-c', 'setsid sleep 1000 & echo $! > orphan; echo $$ > main; wait'],"
        " pathlib.Path('log'), folder=pathlib.Path('.')); time.sleep(1000)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, env=env) as holder:
        pids = [file_within(20, tmp_path / name) for name in ("orphan", "main")]
        holder.kill()
    for pid in pids:
        ends_within(10, pid)
