"""What a real API server does not take, and what goes wrong half-way: one line, exit code 2, and nothing stays."""

import itertools
import json
import os
import re
import signal

import pytest
from cluster_users import add_user, objects_of_job, parts_of_job, until_there_is, write_kubeconfig
from kubernetes import client

from elasticdl.cli.__main__ import main
from elasticdl.cli.cluster_run import Submission
from elasticdl.common.credentials import Role
from elasticdl.kube import manifests
from elasticdl.kube.client import Client
from elasticdl.kube.names import labels
from elasticdl.places.judge import MOST_CRASHES
from tests.cluster.kit import until

pytest_plugins = ["tests.cluster.fixtures"]

WHOLE = 13  # objects of a job, but for its pods
# That it takes to make them, and to let the master go.
REQUESTS = WHOLE + 1


@pytest.fixture
def elasticdl(place, capsys):
    """Run a command in the test's namespace; returns its exit code and what it wrote."""

    def run(*argv):
        code = main([*argv, "--namespace", place.namespace])
        return code, *capsys.readouterr()

    return run


def train(*options):
    return ["train", "--image", "missing/image", "--job_name", "digits", "--model_def", "m", "--detach", *options]


@pytest.mark.parametrize(
    ("flag", "value", "line"),
    [
        ("--kube_context", "nowhere", "there is no context nowhere in the kubeconfig: it has "),
        ("--master_pod_priority", "sky", "the cluster refuses the master's pod: no PriorityClass with name sky"),
        ("--volume", "claim_name=d,mount_path=/d", "--volume: there is no PersistentVolumeClaim d in namespace "),
        ("--env_from_secret", "A=hub/token", "--env_from_secret: there is no Secret hub in namespace "),
        ("--service_account", "me", "--service_account: there is no ServiceAccount me in namespace "),
        # What a cluster says by itself is not said twice.
        ("--volume", "host_path=/a,mount_path=/a;host_path=/b,mount_path=/a/", "the cluster refuses the "),
        ("--pod_template", '{"spec": {"initContainers": [{"name": "x"}]}}', "the cluster refuses the worker's pod: "),
        (
            "--master_pod_template",
            '{"spec": {"tolerations": [{"operator": "X"}]}}',
            "the cluster refuses the master's ",
        ),
    ],
)
def test_what_the_cluster_does_not_take_is_told_before_anything_is_made(elasticdl, place, tmp_path, flag, value, line):
    if flag.endswith("pod_template"):
        (tmp_path / "file").write_text(value)
        value = str(tmp_path / "file")
    code, out, err = elasticdl(*train(flag, value, "--dry_run"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"elasticdl train: {line}")
    assert objects_of_job(place) == set()


@pytest.fixture
def as_user(cluster, place, tmp_path, monkeypatch):
    """Commands are those of a user with one of the roles that every cluster has."""

    def become(role):
        add_user(cluster, place.namespace, "user", role)
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(cluster, place.namespace, "user", tmp_path / "config")))

    return become


@pytest.mark.parametrize(
    ("role", "line"),
    [
        ("view", "you may not delete jobs in "),
        ("edit", "you may not create roles in .*can be named with --service_account"),
    ],
)
def test_who_may_make_some_of_it_makes_nothing(elasticdl, place, as_user, role, line):
    as_user(role)
    code, out, err = elasticdl(*train())
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert re.search(line, err)
    until_there_is(place)


@pytest.mark.parametrize(
    ("role", "options", "objects"), [("admin", (), WHOLE), ("edit", ("--service_account", "default"), WHOLE - 3)]
)
def test_who_may_submit(elasticdl, place, as_user, role, options, objects):
    """An administrator of the namespace, as many a user is: nobody can give the master a right that they have not got. So who has an
    account for the master needs no rights on roles."""
    as_user(role)
    code, _, err = elasticdl(*train(*options))
    assert (code, err.count("\n"), err.startswith("job digits submitted ")) == (0, 1, True), err
    assert len(objects_of_job(place)) == objects
    assert elasticdl("delete", "digits")[:2] == (0, "job digits deleted\n")
    assert objects_of_job(place) == set()


def test_a_queue_that_nothing_heeds_is_told(elasticdl, place):
    code, _, err = elasticdl(*train("--queue", "kueue=q", "--dry_run"))
    assert (code, err) == (0, "warning: --queue kueue=q: the cluster has no Kueue to heed it\n")
    assert place.serves("batch")


@pytest.mark.parametrize(("command", "what"), [("status", "no job"), ("delete", "nothing of a job")])
def test_a_job_that_is_not_there(elasticdl, place, command, what):
    told = f"elasticdl {command}: there is {what} digits in namespace {place.namespace}\n"
    assert elasticdl(command, "digits") == (2, "", told)


@pytest.mark.parametrize(("first", "second"), [(1, None), (6, 7), (REQUESTS, None)])
def test_a_signal_at_any_moment_leaves_all_or_nothing(elasticdl, place, monkeypatch, first, second):
    """Before the ``first`` request that changes something, and a second one from somebody impatient."""
    numbers, ask, make, making = itertools.count(1), Client._ask, Submission.make, []

    def counted(self, verb, kind, *arguments, **options):
        changes = verb in ("create", "patch", "delete") and "dry_run" not in (options.get("query") or {})
        if making and changes and next(numbers) in (first, second):
            os.kill(os.getpid(), signal.SIGINT)
        return ask(self, verb, kind, *arguments, **options)

    monkeypatch.setattr(Submission, "make", lambda *arguments: (making.append(1), make(*arguments)))
    monkeypatch.setattr(Client, "_ask", counted)
    code, _, err = elasticdl(*train())
    assert code == 130
    if first < REQUESTS:
        assert "submitted" not in err
        until_there_is(place)
    else:  # that lets the master go, and there is no way back
        assert "job digits submitted to " in err
        assert len(objects_of_job(place)) == WHOLE
        assert place.read("Job", "digits-master")["spec"]["parallelism"] == 1


def made(place, **change):
    """A job, submitted unless its specification says something more; returns what its pods are owned by."""
    parts = parts_of_job(place)
    job = place.create(manifests.make_job(parts, submitted=not change))
    for manifest in manifests.companions(parts):
        if manifest["metadata"]["name"] == "digits-spec":
            manifest["data"]["job.json"] = json.dumps({**json.loads(manifest["data"]["job.json"]), **change})
        place.create(manifests.owned(manifest, job))
    return {"apiVersion": "batch/v1", "kind": "Job", "name": "digits-master", "uid": job["metadata"]["uid"]}


def wait_until_given_up(cluster, place):
    """So that no other master is started."""
    jobs = (client.BatchV1Api(cluster.client()).list_namespaced_job, place.namespace)
    until(lambda jobs: jobs["digits-master"].spec.backoff_limit == 0, "the Job to be given up", *jobs)


def test_a_master_that_can_not_start_says_so_once_and_for_all(elasticdl, own_cluster, place):
    """As with an image that has another version of the package than the command line."""
    made(place, of_tomorrow=1)
    wait_until_given_up(own_cluster, place)
    code, out, _ = elasticdl("status", "digits")
    assert (code, out.splitlines()[0].startswith("job digits: failed: ")) == (0, True)
    assert "job.json: of_tomorrow: Extra inputs are not permitted" in out


def test_a_job_whose_masters_crash_again_and_again_has_failed(elasticdl, own_cluster, place):
    core, owner = client.CoreV1Api(own_cluster.client()), made(place)
    command = ["python", "-c", "import sys; sys.exit('out of luck')"]
    policy = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    container = {"name": "elasticdl", "image": "local/host", "command": command, **policy}
    for number in range(MOST_CRASHES):
        metadata = {"name": f"crashed-{number}", "labels": labels("digits", Role.MASTER), "ownerReferences": [owner]}
        pod = {"metadata": metadata, "spec": {"restartPolicy": "Never", "containers": [container]}}
        core.create_namespaced_pod(place.namespace, pod)

    def crashed(pods):
        return all(pod.status.phase == "Failed" for pod in pods.values())

    until(crashed, "the masters to crash", core.list_namespaced_pod, place.namespace)
    place.patch("Job", "digits-master", {"spec": {"parallelism": 1}})
    wait_until_given_up(own_cluster, place)
    told = f"job digits: failed: its master crashed {MOST_CRASHES} times in a row: out of luck, exit code 1"
    assert elasticdl("status", "digits")[1].startswith(told)
