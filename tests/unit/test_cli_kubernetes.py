"""What a job on a cluster is made of, and what is said of a master that does not run: all of it pure."""

import copy
import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
import yaml

from elasticdl.cli import namespace_job
from elasticdl.cli.__main__ import main
from elasticdl.cli.namespace_job import NamespaceJob
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.job.spec import JobSpec
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.master.shell.state_config_map import STATUS, pack


def test_manifests_are_written_for_others_to_apply_and_only_for_the_owner_to_read(tmp_path, capsys):
    file = tmp_path / "job.yaml"
    file.write_text("old")
    file.chmod(0o644)
    argv = ["train", "--image", "i", "--model_def", "m", "--job_name", "digits", "--namespace", "lab"]
    assert main([*argv, "--yaml", str(file)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"job digits written to {file}, with its secret keys: ")
    assert "apply this file only: each --yaml makes other keys" in told
    assert file.stat().st_mode & 0o777 == 0o600
    made = list(yaml.safe_load_all(file.read_text()))
    assert (made[-1]["kind"], made[-1]["spec"]["parallelism"]) == ("Job", 1)
    assert {each["metadata"]["namespace"] for each in made} == {"lab"}
    assert [each["immutable"] for each in made if each["kind"] == "Secret"] == [True] * 4
    (spec,) = [each for each in made if each["metadata"]["name"] == "digits-spec"]
    assert JobSpec.from_json(spec["data"]["job.json"]).model_def == "m"
    assert json.loads(spec["data"]["worker.json"])["spec"]["containers"][0]["image"] == "i"


class OneJob:
    """A cluster as a job's commands see it: its Job is there, and what is given."""

    namespace, server = "lab", "https://cluster"

    def __init__(self, status="", master=None, rights=(), events=()):
        state = {"binaryData": {STATUS: pack(status.encode())}} if status else {}
        self._objects = {"Job": {"metadata": {}}, "ConfigMap": {"metadata": {}, **state}}
        self._master = master
        self._rights = rights
        self._events = events

    def find(self, kind, name):
        return self._objects[kind]

    read = find

    def list(self, kind, **selection):
        if kind == "Event":
            return list(self._events)
        return [self._master] if self._master else []

    def may(self, verb, resource):
        return (verb, resource) in self._rights


RUNNING = {"metadata": {"name": "m", "creationTimestamp": "1"}, "status": {"phase": "Running"}}


@contextmanager
def deaf(*_):
    raise UnreachableError("it did not answer")
    yield


@pytest.mark.parametrize(
    ("kept", "master", "phase", "reason"),
    [
        ("", None, "starting", "its master's pod is not there yet"),
        ("", RUNNING, "starting", "its master does not answer at the moment"),
        ("running", None, "running", "there is no master at the moment: its master's pod is not there yet; showing"),
        ("running", RUNNING, "running", "its master does not answer at the moment; showing the last saved status"),
        ("stopped", RUNNING, "stopped", "enough"),
    ],
)
def test_a_job_without_a_master_is_shown_as_it_was_last(monkeypatch, kept, master, phase, reason):
    monkeypatch.setattr(NamespaceJob, "_endpoint", deaf)
    status = json.dumps({"phase": kept, "step": "7", "reason": "enough" if kept == "stopped" else ""}) if kept else ""
    seen = NamespaceJob(OneJob(status, master, [("get", "pods/portforward")]), "digits").status()
    assert (seen.phase, seen.step) == (phase, 7 if kept else 0)
    assert seen.reason.startswith(reason)


def event(when, reason, message="", kind="Warning"):
    return {"lastTimestamp": f"2026-01-01T00:00:{when:02}Z", "type": kind, "reason": reason, "message": message}


MADE = event(1, "SuccessfulCreate", kind="Normal")
REFUSED = event(2, "FailedCreate", 'Error creating: pods "m-x" is forbidden: exceeded quota: q')
UNMOUNTED = event(3, "FailedMount", "the server is not there")
STARTING = {
    "phase": "Pending",
    "containerStatuses": [{"name": "elasticdl", "state": {"waiting": {"reason": "ContainerCreating"}}}],
}
QUOTA = "the cluster does not take its master's pod: exceeded quota: q"


@pytest.mark.parametrize(
    ("status", "events", "reason"),
    [
        (None, [MADE, REFUSED], QUOTA),
        (None, [REFUSED, {**MADE, "lastTimestamp": "2026-01-01T00:00:09Z"}], "its master's pod is not there yet"),
        ({"phase": "Failed", "reason": "Evicted"}, [MADE, REFUSED], QUOTA),
        ({"phase": "Failed", "reason": "Evicted"}, [MADE], "its master ended: Evicted"),
        (STARTING, [UNMOUNTED], "its master waits: it can't be started on node n: the server is not there"),
        (STARTING, [UNMOUNTED, event(4, "Pulling", "Pulling image", "Normal")], "its master is starting"),
    ],
)
def test_why_there_is_no_master_is_told_where_only_an_event_says_it(status, events, reason):
    pod = {**copy.deepcopy(RUNNING), "spec": {"nodeName": "n"}, "status": status} if status else None
    if pod:
        pod["metadata"]["uid"] = "u"
    assert NamespaceJob(OneJob(master=pod, events=events), "digits").status().reason == reason


def test_who_may_not_reach_a_master_is_told_what_it_takes(monkeypatch):
    monkeypatch.setattr(NamespaceJob, "_endpoint", deaf)
    line = "you may not reach the master: it takes the right to get pods/portforward in namespace lab"
    with pytest.raises(UserError, match=line):
        NamespaceJob(OneJob(master=RUNNING), "digits").status()


def test_a_job_whose_master_has_no_place_is_deleted_as_it_can_not_be_stopped():
    line = (
        "job digits has no master at the moment: its master's pod is not there yet; `elasticdl status digits` tells when it has; "
        "`elasticdl delete digits` ends it without one"
    )
    with pytest.raises(UserError, match=line), NamespaceJob(OneJob(), "digits").master():
        pass


class Resubmitted(OneJob):
    """Its job is submitted anew as soon as the name is free."""

    def __init__(self):
        self.there = self._objects("old")

    def _objects(self, uid):
        owned = {"ownerReferences": [{"kind": "Job", "name": "digits-master", "uid": uid}]}
        secret = {"name": f"secret-{uid}", "uid": f"of-{uid}", **owned}
        return {"Job": [{"metadata": {"name": "digits-master", "uid": uid}}], "Secret": [{"metadata": secret}]}

    def list(self, kind, **selection):
        return self.there.get(kind, [])

    def delete(self, kind, name):
        there = [each for each in self.there[kind] if each["metadata"]["name"] != name]
        self.there = {**self.there, kind: there}
        if kind == "Job":
            later = self._objects("new")
            self.there = {each: [*self.there[each], *later[each]] for each in later}


def test_a_job_that_is_submitted_while_its_namesake_is_deleted_stays(monkeypatch):
    cluster = Resubmitted()
    monkeypatch.setattr(namespace_job, "connect", lambda place: cluster)
    monkeypatch.setattr(namespace_job, "POLL", 0.0)
    assert namespace_job.delete("digits", ClusterTarget()) == "job digits deleted"
    assert cluster.there == cluster._objects("new")


def test_without_the_package_it_is_said_how_to_get_it():
    code = (
        "import sys; sys.modules['kubernetes'] = None; from elasticdl.cli.__main__ import main; "
        "sys.exit(main(['status', 'x', '--namespace', 'y']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = "elasticdl status: jobs on a cluster need the package kubernetes: pip install '.[kubernetes]' in a checkout of elasticdl, "
    assert (done.returncode, done.stderr) == (2, f"{said}or its wheel with [kubernetes] (docs/install.md)\n")
