"""The test cluster behaves as Kubernetes does, as far as the framework relies on it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.kit import container, shell

pytest_plugins = ["tests.cluster.fixtures"]

FOREVER = "while :; do sleep 0.1; done"


def file_within(seconds, path):
    """The content of a file that a pod is about to write."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)
    return path.read_text().strip()


@pytest.mark.parametrize(
    ("main", "phase", "code", "reason", "log"),
    [
        (shell("echo said; exit 0"), "Succeeded", 0, "Completed", "said\n"),
        (shell("echo wrong >&2; exit 3"), "Failed", 3, "Error", "wrong\n"),
        ({"command": ["no-such-program"]}, "Failed", 128, "StartError", None),
    ],
)
def test_how_a_container_ended_is_told(pods, main, phase, code, reason, log):
    pods.create("one", main)
    pod = pods.ended("one")
    ended = container(pod).state.terminated
    assert (pod.status.phase, ended.exit_code, ended.reason) == (phase, code, reason)
    if log is None:
        assert "no-such-program" in ended.message
    else:
        assert pods.log("one") == log


def test_a_container_sees_what_its_manifest_gives_it(pods):
    pods.core.create_namespaced_secret(pods.namespace, {"metadata": {"name": "key"}, "stringData": {"token": "t0ken"}})
    settings = {"metadata": {"name": "settings"}, "data": {"a": "b", "c": "d"}}
    pods.core.create_namespaced_config_map(pods.namespace, settings)
    env = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "key", "key": "token"}}},
        {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "key", "key": "none", "optional": True}}},
        {"name": "SELF", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "SAID", "value": "$(TOKEN) $$(TOKEN) $(OTHER) $(SELF)"},
    ]
    mounts = [{"name": "settings", "mountPath": "/given"}, {"name": "room", "mountPath": "/room", "subPath": "part"}]
    items = [{"key": "c", "path": "deep/c"}]
    volumes = [
        {"name": "settings", "configMap": {"name": "settings", "items": items}},
        {"name": "room", "emptyDir": {}},
    ]
    script = "echo $SAID ${NONE-nothing} $set_a; cat /given/deep/c; echo; ls /given; echo x > /room/x; cat /room/x"
    from_all = [{"prefix": "set_", "configMapRef": {"name": "settings"}}]
    main = {**shell(script), "env": env, "envFrom": from_all, "volumeMounts": mounts}
    pods.create("given", main, volumes=volumes, securityContext={"fsGroup": 1000})
    assert pods.ended("given").status.phase == "Succeeded", pods.log("given")
    assert pods.log("given") == "t0ken $(TOKEN) $(OTHER) given nothing b\nd\ndeep\nx\n"


SERVER = """
import os, socket
server = socket.create_server((os.environ["IP"], 8000))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(os.environ["HOSTNAME"].encode())
    connection.close()
"""


def test_the_name_of_a_service_leads_to_its_pod_and_to_the_next(pods):
    spec = {"clusterIP": "None", "selector": {"app": "echo"}, "ports": [{"port": 8000}]}
    pods.core.create_namespaced_service(pods.namespace, {"metadata": {"name": "echo"}, "spec": spec})
    env = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    where = [{"name": "WHERE", "value": f"echo.{pods.namespace}.svc:8000"}]
    for name in ("first", "second"):
        pods.create(name, {"command": ["python", "-c", SERVER], "env": env}, labels={"app": "echo"})
        pods.said(name, "listening")
        pods.create(f"asks-{name}", {**shell("cat < /dev/tcp/${WHERE%:*}/${WHERE#*:}"), "env": where})
        assert pods.ended(f"asks-{name}").status.phase == "Succeeded", pods.log(f"asks-{name}")
        assert pods.log(f"asks-{name}") == name
        pods.delete(name, grace_period_seconds=0)
        pods.gone(name)


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


def test_an_image_that_cannot_be_pulled(pods):
    def is_held_back(pod):
        waits = [each.state.waiting for each in pod.status.container_statuses or []]
        return any(waits) and waits[0].reason == "ImagePullBackOff"

    pods.create("imageless", {**shell("true"), "image": "missing/image:1"})
    pod = pods.wait("imageless", is_held_back, "pull held back")
    assert (pod.status.phase, "missing/image:1" in container(pod).state.waiting.message) == ("Pending", True)


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
    _, alive = psutil.wait_procs([psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))], 10)
    assert alive == []
