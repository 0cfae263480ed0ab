"""What a job on a cluster is made of, and what is said of a master that does not run: all of it pure."""

import copy
import json
import subprocess
import sys
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
import yaml

from elasticdl.cli import namespace_job
from elasticdl.cli.__main__ import main
from elasticdl.cli.cluster_run import make_parts
from elasticdl.cli.namespace_job import NamespaceJob
from elasticdl.common.credentials import Role
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.job.spec import JobSpec
from elasticdl.kube import manifests
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.manifests import as_yaml
from elasticdl.master.shell.state_config_map import STATUS, pack

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def parts(**options):
    spec = JobSpec.model_validate({"image": "team/job:1", "job_name": "digits", "num_workers": "2-4", **options})
    return make_parts(spec, "lab", NOW)


def test_a_master_may_change_pods_where_they_are_a_group_of_kueues():
    def verbs(**options):
        (role,) = [each for each in manifests.companions(parts(**options)) if each["kind"] == "Role"]
        (rule,) = [rule for rule in role["rules"] if rule["resources"] == ["pods"]]
        return set(rule["verbs"])

    usual, gang = verbs(), {"gang": True, "num_workers": "3"}
    assert verbs(queue="kueue=lab", **gang) == {*usual, "patch"}
    for others in (gang, {"queue": "volcano=lab", **gang}, {"queue": "kueue=lab"}):
        assert verbs(**others) == usual


def test_an_account_of_the_users_is_used_as_it_is():
    made = parts(service_account="me")
    kinds = {manifest["kind"] for manifest in manifests.companions(made)}
    assert kinds == {"Secret", "ConfigMap", "NetworkPolicy", "Service"}
    assert made.master["spec"]["serviceAccountName"] == "me"


def test_each_role_has_its_own_secret_and_the_pods_theirs_only():
    made = parts()
    secrets = {each["metadata"]["name"] for each in manifests.companions(made) if each["kind"] == "Secret"}
    assert secrets == {f"digits-{role}-tls" for role in Role}
    for pod, role in ((made.master, "master"), (made.worker, "worker")):
        mounted = [volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume]
        assert mounted == [f"digits-{role}-tls"]


def test_a_gang_of_volcanos_has_a_group_of_its_size_in_its_queue():
    made = parts(gang=True, queue="volcano=lab", num_workers="3")
    (group,) = [each for each in manifests.companions(made) if each["kind"] == "PodGroup"]
    assert (group["apiVersion"], group["spec"]) == ("scheduling.volcano.sh/v1beta1", {"minMember": 3, "queue": "lab"})
    assert group["metadata"]["name"] == made.worker["metadata"]["annotations"]["scheduling.k8s.io/group-name"]
    for others in ({}, {"queue": "volcano=lab"}, {"queue": "kueue=lab", "gang": True, "num_workers": "3"}):
        assert "PodGroup" not in {each["kind"] for each in manifests.companions(parts(**others))}


def test_a_submitted_job_goes_by_itself_some_time_after_its_end_and_one_from_a_file_stays():
    assert manifests.make_job(parts(ttl=60), submitted=True)["spec"]["ttlSecondsAfterFinished"] == 60
    assert manifests.make_job(parts(), submitted=True)["spec"]["ttlSecondsAfterFinished"] == 7 * 24 * 3600
    assert "ttlSecondsAfterFinished" not in manifests.make_job(parts(ttl=0), submitted=True)["spec"]
    assert "ttlSecondsAfterFinished" not in manifests.make_job(parts())["spec"]


@pytest.mark.parametrize("word", ["y", "1e3", "0o7", "null"])
def test_a_word_in_a_file_of_objects_is_a_word_for_every_reader(word):
    """PyYAML writes some without quotes that kubectl, by another version of YAML, takes for a truth value or a number."""
    written = as_yaml([{"metadata": {"labels": {"job": word, "same": word}}, "count": 1, "is": True}])
    assert written.count(f'"{word}"') == 2
    assert "count: 1\n" in written
    assert yaml.safe_load(written) == {"metadata": {"labels": {"job": word, "same": word}}, "count": 1, "is": True}


@pytest.mark.parametrize(
    ("options", "master"),
    [
        ({}, None),
        ({"worker_pod_priority": "high"}, "high"),
        ({"worker_pod_priority": "high=0.5"}, "high"),
        ({"worker_pod_priority": "high", "master_pod_priority": "higher"}, "higher"),
        ({"worker_pod_template": "spec: {priorityClassName: high}", "master_pod_priority": "higher"}, "higher"),
        ({"pod_template": "spec: {priorityClassName: high}"}, "high"),
    ],
)
def test_a_master_is_as_urgent_as_its_workers(tmp_path, options, master):
    for name in [name for name in options if "template" in name]:
        (tmp_path / name).write_text(options[name])
        options = {**options, name: str(tmp_path / name)}
    assert parts(**options).master["spec"].get("priorityClassName") == master


def test_values_of_variables_are_in_a_secret_of_the_job_and_nowhere_else():
    made = parts(envs="TOKEN=hush")
    holders = [each for each in manifests.companions(made) if "aHVzaA==" in json.dumps(each)]
    assert [(each["kind"], each["metadata"]["name"]) for each in holders] == [("Secret", "digits-envs")]
    assert "hush" not in json.dumps([*manifests.companions(made), manifests.make_job(made)])


def test_a_template_for_all_pods_names_the_workers_account_and_not_the_masters(tmp_path):
    (tmp_path / "pod.yaml").write_text("spec: {serviceAccountName: cloud, automountServiceAccountToken: null}")
    for option in ("pod_template", "worker_pod_template"):
        made = parts(**{option: str(tmp_path / "pod.yaml")})
        assert made.worker["spec"]["serviceAccountName"] == "cloud"
        assert made.master["spec"]["serviceAccountName"] == "digits-master"
        assert made.master["spec"]["automountServiceAccountToken"] is True


def test_masters_that_never_get_to_work_are_not_started_for_weeks_and_the_next_does_not_wait_for_the_end_of_one():
    spec = manifests.make_job(parts())["spec"]
    assert spec["backoffLimit"] <= 100
    # With a policy the Job waits until the pod of a node that is lost is gone.
    assert "podFailurePolicy" not in spec


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
