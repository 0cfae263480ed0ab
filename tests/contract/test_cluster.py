"""The test cluster behaves as Kubernetes does, as far as the framework relies on it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.kit import container, shell

pytest_plugins = ["tests.cluster.fixtures"]

FOREVER = "while :; do sleep 0.1; done"


def waiting_reason(pod):
    statuses = pod.status.container_statuses or []
    return statuses[0].state.waiting.reason if statuses and statuses[0].state.waiting else None


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
