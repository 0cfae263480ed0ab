"""Two jobs of a cluster, looked at by the dashboard and the report while they train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest
from cluster_kit import DEADLINE, command_line, objects_in, wait_for
from running_job import ZOO

pytest_plugins = ["tests.cluster.fixtures"]
pytestmark = pytest.mark.slow

PAGE = '<script type="application/json" id="data">'


@pytest.fixture
def elasticdl(own_cluster, namespace, tmp_path):
    return command_line(own_cluster.kubeconfig, namespace, tmp_path / "home")


def submit(elasticdl, name):
    done = elasticdl(
        *("train", "--detach", "--image", "local/host", "--job_name", name),
        *("--model_zoo", str(ZOO), "--model_def", "paced_mlp"),
        *("--model_params", "sample_seconds=0.005", "--global_batch_size", "64", "--num_epochs", "100000"),
        *("--num_workers", "1", "--worker_resource_request", "cpu=0.1,memory=256Mi,gpu=1"),
    )
    assert done.returncode == 0, done.stderr


def journal(elasticdl, name):
    return [json.loads(line) for line in elasticdl("events", name, "--json").stdout.splitlines()]


def wait_for_members(elasticdl, name, number):
    """Until the job's latest world has so many."""

    def arrived():
        sizes = [len(entry["members"]) for entry in journal(elasticdl, name) if entry["event"] == "world_formed"]
        return sizes[-1:] == [number]

    wait_for(f"{number} members of {name}", arrived, lambda: elasticdl("events", name).stdout[-3000:])


def stop(elasticdl, name):
    assert elasticdl("stop", name, "--now").returncode == 0
    assert elasticdl("delete", name).stdout == f"job {name} deleted\n"


def check_dashboard(own_cluster, namespace, home):
    def jobs(url):
        with urllib.request.urlopen(f"{url}data.json", timeout=DEADLINE) as answer:
            return {job["name"]: job["phase"] for job in json.load(answer).get("content", ())}

    env = {**os.environ, "KUBECONFIG": str(own_cluster.kubeconfig), "ELASTICDL_HOME": str(home)}
    command = [sys.executable, "-m", "elasticdl.cli", "dashboard", "red", "--namespace", namespace]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            page = process.stdout.readline().strip()
            listed = page.partition("job/")[0]
            wait_for("list of both jobs", lambda: jobs(listed) == {"red": "running", "blue": "running"})
            with urllib.request.urlopen(page, timeout=DEADLINE) as answer:
                assert b"<title>red" in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()


def test_jobs_of_a_cluster_are_seen_by_the_dashboard_and_the_report(elasticdl, own_cluster, namespace, tmp_path):
    before = objects_in(own_cluster, namespace)
    for name in ("red", "blue"):
        submit(elasticdl, name)
    for name in ("red", "blue"):
        wait_for_members(elasticdl, name, 1)
    check_dashboard(own_cluster, namespace, tmp_path / "home")
    stop(elasticdl, "blue")
    page = tmp_path / "red.html"
    assert elasticdl("report", "red", "--out", str(page)).stdout == f"{page}\n"
    told = json.loads(page.read_text().partition(PAGE)[2].partition("</script>")[0])
    assert [size for _, size, *_ in told["worlds"]] == [1]
    stop(elasticdl, "red")
    assert objects_in(own_cluster, namespace) == before
