"""A job on a real API server: that all of its objects are made, or none, who its pods are there, and how its master is reached."""

import base64
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from kubernetes import client, config

from elasticdl.cli.__main__ import main
from elasticdl.cli.cluster_run import Submission, make_parts
from elasticdl.common.credentials import Role
from elasticdl.common.errors import UserError
from elasticdl.job.spec import JobSpec
from elasticdl.kube import kubeconfig, manifests
from elasticdl.kube.client import Client, connect
from elasticdl.kube.job_pods import forwarded
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.names import labels
from elasticdl.places.judge import MOST_CRASHES
from tests.cluster.build import CLUSTER
from tests.cluster.kit import until
from tests.waiting import wait_until

pytest_plugins = ["tests.cluster.fixtures"]

JOB = "digits"
KINDS = ("Job", "Service", "ServiceAccount", "Role", "RoleBinding", "Secret", "ConfigMap", "NetworkPolicy")


@pytest.fixture
def place(cluster, namespace, monkeypatch, tmp_path):
    """A client in a namespace of the test's own, as the command line makes it, of whoever may do everything."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path / "home"))
    return connect(ClusterTarget(namespace))


def parts_of_job(place, image="local/host", **options):
    spec = JobSpec.model_validate({"image": image, "job_name": JOB, "model_def": "m", **options})
    return make_parts(spec, place.namespace, datetime.now(UTC))


def objects_of_job(place):
    """What is there of the job, by kind and name, apart from its pods, which come and go with the rest."""
    mine = f"elasticdl.org/job={JOB}"
    return {(kind, each["metadata"]["name"]) for kind in KINDS for each in place.list(kind, label_selector=mine)}


def until_there_is(place, expected=frozenset()):
    """Wait until a Job that was deleted has taken with it what it owned, and only this is left of the job."""
    wait_until(lambda: objects_of_job(place) == set(expected), lambda: objects_of_job(place))


def token_of(cluster, namespace, account):
    core = client.CoreV1Api(cluster.client())
    return core.create_namespaced_service_account_token(account, namespace, {"spec": {"audiences": []}}).status.token


def write_kubeconfig(cluster, namespace, account, path):
    """The administrator's, with another user and namespace."""
    content = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    current = content["current-context"]
    (context,) = (each["context"] for each in content["contexts"] if each["name"] == current)
    context.update(user=account, namespace=namespace)
    content["users"] = [{"name": account, "user": {"token": token_of(cluster, namespace, account)}}]
    path.write_text(yaml.safe_dump(content))
    return path


def authority_of(cluster):
    """The certificate of the cluster's authority, PEM."""
    content = yaml.safe_load(Path(cluster.kubeconfig).read_text())
    current = next(each["context"] for each in content["contexts"] if each["name"] == content["current-context"])
    found = next(each["cluster"] for each in content["clusters"] if each["name"] == current["cluster"])
    if "certificate-authority-data" in found:
        return base64.b64decode(found["certificate-authority-data"])
    return Path(cluster.kubeconfig).parent.joinpath(found["certificate-authority"]).read_bytes()


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


# ---- whom a job's pods are, and what they may do: what the Role says, and nothing else ----


MASTER = "digits-master"


@pytest.fixture
def parts(place):
    """Those of a job that is there, with a master that does not get to run."""
    parts = parts_of_job(place, "missing/image")
    Submission(place, parts, print).make()
    return parts


@pytest.fixture
def in_the_masters_pod(cluster, place, parts, tmp_path, monkeypatch):
    """What the master's process finds there: its token where Kubernetes mounts it, and where the cluster is; no kubeconfig."""
    files = {"token": token_of(cluster, place.namespace, MASTER).encode(), "ca.crt": authority_of(cluster)}
    for name, content in {**files, "namespace": place.namespace.encode()}.items():
        (tmp_path / name).write_bytes(content)
    server = urlsplit(place.server)
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(server.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port or 443))
    monkeypatch.setattr(config.incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(config.incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(kubeconfig, "ACCOUNT", tmp_path)


@pytest.fixture
def master(in_the_masters_pod, place):
    return connect(ClusterTarget(place.namespace), own_account=True)


def allowed(api, namespace):
    """All that whoever asks may do there."""
    review = {"spec": {"namespace": namespace}}
    may = client.AuthorizationV1Api(api).create_self_subject_rules_review(review).status
    assert may.incomplete is False
    given = ((each.verbs, each.api_groups, each.resources, each.resource_names or [""]) for each in may.resource_rules)
    return {each for rule in given for each in itertools.product(*rule)}


def test_the_masters_account_may_do_what_its_role_says_and_nothing_else(cluster, master, place, tmp_path):
    parts = ("verbs", "apiGroups", "resources", "resourceNames")
    rules = ([rule.get(part, [""]) for part in parts] for rule in manifests.rules(JOB))
    said = {each for rule in rules for each in itertools.product(*rule)}
    # An account without a role may ask who it is and what it may do, and on newer clusters list the trust bundles.
    someone = write_kubeconfig(cluster, place.namespace, "default", tmp_path / "someone")
    anybody = allowed(config.new_client_from_config(str(someone)), place.namespace)
    assert said & anybody == set()
    assert allowed(master.api, place.namespace) == said | anybody


def test_a_command_within_a_pod_uses_the_pods_own_account(in_the_masters_pod, place):
    here = connect(ClusterTarget())
    assert (here.namespace, urlsplit(here.server).port) == (place.namespace, urlsplit(place.server).port)
    assert here.read("Job", MASTER)["metadata"]["name"] == MASTER
    with pytest.raises(UserError, match=f"you may not list secrets in namespace {place.namespace}: .*cannot list"):
        here.list("Secret")


def test_only_the_masters_pod_has_a_token(cluster, place, parts):
    """As the API server itself completes them."""
    core = client.CoreV1Api(cluster.client())
    for pod, role in ((parts.master, Role.MASTER), (parts.worker, Role.WORKER)):
        made = core.create_namespaced_pod(place.namespace, manifests.pod_of(parts, pod, role), dry_run="All")
        mounts = [each.mount_path for container in made.spec.containers for each in container.volume_mounts]
        assert any("serviceaccount" in path for path in mounts) == (role is Role.MASTER)


# ---- what a real API server does not take, and what goes wrong half-way: one line, exit code 2, and nothing stays ----


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
        ("--master_pod_template", "spec: {tolerations: [{operator: X}]}", "the cluster refuses the master's pod: "),
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
        api, metadata = cluster.client(), {"name": "user"}
        client.CoreV1Api(api).create_namespaced_service_account(place.namespace, {"metadata": metadata})
        subjects = [{"kind": "ServiceAccount", "name": "user", "namespace": place.namespace}]
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        binding = {"metadata": metadata, "roleRef": reference, "subjects": subjects}
        client.RbacAuthorizationV1Api(api).create_namespaced_role_binding(place.namespace, binding)
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


# ---- a port of this machine that leads through the API server into a pod ----

ECHO = """
import os, socket, threading
def echo(connection):
    while data := connection.recv(1 << 16):
        connection.sendall(data)
    connection.close()
server = socket.create_server((os.environ["IP"], 50001))
print("listening", flush=True)
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""


def start_echo(pods, name):
    env = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    pods.create(name, {"command": ["python", "-c", ECHO], "env": env}, labels=labels("j", Role.MASTER))
    pods.said(name, "listening")


def say(address, data):
    """What comes back; nothing of a connection that is reset."""
    with connected(address) as connection, connection.makefile("rb") as answer:
        writer = threading.Thread(target=connection.sendall, args=(data,))
        writer.start()
        try:
            return answer.read(len(data))
        except ConnectionResetError:
            return b""
        finally:
            writer.join()


def connected(address):
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), 10)
    connection.settimeout(10)
    return connection


def test_it_leads_to_the_master_and_to_its_successor_and_ends_with_what_goes_through_it(place, pods):
    start_echo(pods, "first")
    with forwarded(place, "j") as address:
        assert say(address, b"hello") == b"hello"
        big = bytes(range(256)) * 4096
        assert say(address, big) == big
        pods.delete("first", grace_period_seconds=0)
        pods.gone("first")
        assert say(address, b"hello") == b""
        start_echo(pods, "second")
        connection = connected(address)
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
    with connection:
        assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connected(address)
    mine = [thread for thread in threading.enumerate() if "port" in thread.name or "process_request" in thread.name]
    for thread in mine:
        thread.join(10)
    assert not [thread.name for thread in mine if thread.is_alive()]
