"""The test cluster behaves as Kubernetes does, as far as the framework relies on it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from kubernetes import client

from tests.cluster.kit import container, is_ended, is_running, shell, until
from tests.cluster.node import EVICT, OOM_KILL

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


def accepts(host, port):
    """Whether somebody listens there."""
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


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
    pods.running("killed")
    os.kill(int(file_within(20, tmp_path / "main")), signal.SIGKILL)
    ended = container(pods.ended("killed")).state.terminated
    assert (ended.exit_code, ended.reason) == (137, "Error")
    ends_within(5, file_within(5, tmp_path / "orphan"))


def test_a_program_that_does_not_exist_fails_the_pod(own_cluster, pods):
    pods.create("nothing", {"command": ["no-such-program"]})
    ended = container(pods.ended("nothing")).state.terminated
    assert (ended.exit_code, ended.reason) == (128, "StartError")
    assert "no-such-program" in ended.message


def test_a_failed_container_is_started_again_with_its_volume(pods):
    script = "echo run; test -e /scratch/seen && exit 0; touch /scratch/seen; exit 1"
    mount = {"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
    volumes = [{"name": "scratch", "emptyDir": {}}]
    pods.create("again", {**shell(script), **mount}, restartPolicy="OnFailure", volumes=volumes)
    status = container(pods.wait("again", is_ended, "ended"))
    assert (status.restart_count, status.state.terminated.exit_code) == (1, 0)
    assert status.last_state.terminated.exit_code == 1
    assert pods.log("again", previous=True) == "run\n"


def test_a_container_that_keeps_failing_is_held_back(pods):
    pods.create("crash", shell("exit 1"), restartPolicy="Always")
    pods.wait("crash", lambda pod: waiting_reason(pod) == "CrashLoopBackOff", "held back")
    assert pods.core.read_namespaced_pod("crash", pods.namespace).status.phase == "Running"


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


def test_a_deaf_pod_is_killed_when_its_grace_is_over(own_cluster, pods, tmp_path):
    pods.create("deaf", shell(f"trap '' TERM; echo $BASHPID > {tmp_path}/pid; {FOREVER}"))
    pid = int(file_within(20, tmp_path / "pid"))
    begin = time.monotonic()
    pods.delete("deaf", grace_period_seconds=1)
    pods.gone("deaf")
    assert time.monotonic() - begin >= 0.9
    assert not Path(f"/proc/{pid}").exists()


def test_a_pod_whose_object_is_removed_by_force_is_killed(own_cluster, pods, tmp_path):
    pods.create("forced", shell(f"trap '' TERM; echo $BASHPID > {tmp_path}/pid; {FOREVER}"))
    pid = file_within(20, tmp_path / "pid")
    pods.delete("forced", grace_period_seconds=0)
    ends_within(10, pid)


# Placement


def test_gpus_are_handed_out_once_and_preempted_by_priority(own_cluster, pods, priorities):
    low, high = priorities
    worker = shell(f"trap 'echo checkpoint; exit 0' TERM; echo gpus=$NVIDIA_VISIBLE_DEVICES; {FOREVER}")
    names = [f"low-{number}" for number in range(8)]
    for name in names:
        pods.create(name, worker, gpus=1, priorityClassName=low)
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
    assert len(victims) == 2
    assert set(victims) < {pod.metadata.name for pod in running}
    for victim in victims:
        logs = (own_cluster.logs / "pods").glob(f"{pods.namespace}_{victim}_*/main.0.log")
        assert [path.read_text().splitlines()[1:] for path in logs] == [["checkpoint"]]


@pytest.fixture
def dark_and_silent(own_cluster):
    """Two more nodes, gone after the test with all that runs on them, whatever has become of them in it."""
    names = ("dark", "silent")
    for node in names:
        own_cluster.add_node(node, 0, wait=False)
    for node in names:
        own_cluster.wait_for_node(node)
    yield
    for node in set(names) & set(own_cluster.node_names):
        own_cluster.lose_node(node)
    for node in names:
        client.CoreV1Api(own_cluster.client()).delete_node(node)


@pytest.mark.usefixtures("dark_and_silent")
def test_a_lost_node_and_one_that_comes_back(own_cluster, pods, tmp_path):
    core = pods.core
    for node in ("dark", "silent"):
        script = f"trap '' TERM; echo $BASHPID > {tmp_path}/{node}; {FOREVER}"
        place = {"nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 1}
        pods.create(f"on-{node}", shell(script), **place)
    pids = {node: file_within(20, tmp_path / node) for node in ("dark", "silent")}
    pods.until(lambda seen: all(map(is_running, seen.values())), "both running")

    own_cluster.freeze_node("silent")
    own_cluster.lose_node("dark")
    ends_within(5, pids["dark"])

    def unknown(nodes):
        return {name for name in ("dark", "silent") if condition(nodes[name], "Ready").status == "Unknown"}

    until(lambda nodes: len(unknown(nodes)) == 2, "both nodes unknown", core.list_node)
    pods.until(lambda seen: all(pod.metadata.deletion_timestamp for pod in seen.values()), "both pods given up")
    assert Path(f"/proc/{pids['silent']}").exists()  # nobody can have told it

    own_cluster.thaw_node("silent")
    pods.gone("on-silent")
    ends_within(5, pids["silent"])
    own_cluster.wait_for_node("silent")
    own_cluster.add_node("dark", 0)
    pods.gone("on-dark")  # its node is there again, and says that it runs no more


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


def test_a_pod_reaches_the_api_with_its_account_and_no_further(pods):
    rbac = client.RbacAuthorizationV1Api(pods.core.api_client)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    rbac.create_namespaced_role(pods.namespace, {"metadata": {"name": "reader"}, "rules": rules})
    account = {"kind": "ServiceAccount", "name": "default", "namespace": pods.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    binding = {"metadata": {"name": "reader"}, "subjects": [account], "roleRef": role}
    rbac.create_namespaced_role_binding(pods.namespace, binding)
    script = (
        "import sys; from kubernetes import client, config; config.load_config(); core = client.CoreV1Api();"
        "print([pod.metadata.name for pod in core.list_namespaced_pod(sys.argv[1]).items]);"
        "core.delete_namespaced_pod('inside', sys.argv[1])"
    )
    pods.create("inside", {"command": ["python3", "-u", "-c", script, pods.namespace]})
    assert container(pods.ended("inside")).state.terminated.exit_code == 1
    log = pods.log("inside")
    assert "['inside']\n" in log
    assert "Reason: Forbidden" in log


def test_a_pod_waits_for_the_secret_that_it_names(pods):
    reference = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "late", "key": "token"}}}
    pods.create("waits", {**shell("echo $TOKEN"), "env": [reference]})
    pods.wait("waits", lambda pod: waiting_reason(pod) == "CreateContainerConfigError", "told what is missing")
    pods.core.create_namespaced_secret(pods.namespace, {"metadata": {"name": "late"}, "stringData": {"token": "here"}})
    assert pods.ended("waits").status.phase == "Succeeded"
    assert pods.log("waits") == "here\n"


def test_pods_have_addresses_of_their_own(own_cluster, pods):
    script = "import os, http.server as h; h.ThreadingHTTPServer((os.environ['IP'], 8000), h.SimpleHTTPRequestHandler).serve_forever()"
    env = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    for name in ("one", "two"):
        pods.create(name, {"command": ["python3", "-c", script], "env": env})
    addresses = {pods.running(name).status.pod_ip for name in ("one", "two")}
    assert len(addresses) == 2
    for address in addresses:
        deadline = time.monotonic() + 20
        while not accepts(address, 8000):
            assert time.monotonic() < deadline, f"nobody listens on {address}:8000"
            time.sleep(0.05)


# What goes wrong


def test_an_image_that_cannot_be_pulled(pods):
    pods.create("imageless", {**shell("true"), "image": "missing/image:1"})
    pods.wait("imageless", lambda pod: waiting_reason(pod) in ("ErrImagePull", "ImagePullBackOff"), "pull failed")
    pod = pods.wait("imageless", lambda pod: waiting_reason(pod) == "ImagePullBackOff", "pull held back")
    assert pod.status.phase == "Pending"
    assert "missing/image:1" in container(pod).state.waiting.message
    pods.delete("imageless")
    pods.gone("imageless")


def test_a_container_out_of_memory_and_a_pod_evicted(own_cluster, pods):
    for name in ("greedy", "evicted"):
        pods.create(name, shell(FOREVER))
        pods.running(name)
    pods.annotate("greedy", **{OOM_KILL: "1"})
    pods.annotate("evicted", **{EVICT: "1"})
    ended = container(pods.ended("greedy")).state.terminated
    assert (ended.exit_code, ended.reason) == (137, "OOMKilled")
    evicted = pods.ended("evicted").status
    assert (evicted.phase, evicted.reason) == ("Failed", "Evicted")


def test_the_api_server_restarts_under_watches_and_pods(own_cluster, pods, tmp_path):
    pods.create("steady", shell(FOREVER))
    pods.create("ends", shell(f"while [ ! -e {tmp_path}/end ]; do sleep 0.1; done; exit 5"))
    before = container(pods.running("steady")).container_id
    pods.running("ends")
    watched = []
    watcher = threading.Thread(target=lambda: watched.append(pods.ended("ends")))  # it watches all through the restart
    watcher.start()
    host, _, port = own_cluster.server.rpartition("/")[2].partition(":")

    restart = threading.Thread(target=own_cluster.restart_api_server, kwargs={"down_s": 2.0})
    restart.start()
    while accepts(host, int(port)):
        assert restart.is_alive()
    (tmp_path / "end").touch()  # it ends while nobody can be told
    restart.join(90)
    assert not restart.is_alive()

    watcher.join(60)
    assert [container(pod).state.terminated.exit_code for pod in watched] == [5]
    steady = container(pods.running("steady"))
    assert (steady.container_id, steady.restart_count) == (before, 0)
    pods.create("after", shell("exit 0"))
    assert pods.ended("after").status.phase == "Succeeded"


def test_logs_are_followed_and_cut(pods):
    pods.create("talks", shell(f"for i in 1 2 3 4; do echo line $i; done; {FOREVER}"))
    pods.running("talks")
    pods.said("talks", "line 4")
    assert pods.log("talks", tail_lines=2) == "line 3\nline 4\n"
    with pytest.raises(client.ApiException) as refused:
        pods.log("talks", container="other")
    assert refused.value.status == 400


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
