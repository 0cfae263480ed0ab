"""The pods of a job: what is in them, and how the user's own template is merged in."""

import copy
import json

import pytest

from elasticdl.common.credentials import Role, interface_of
from elasticdl.common.errors import UserError
from elasticdl.job.spec import JobSpec
from elasticdl.kube.manifests import finish_pod, master_pod, merge, with_pod_templates, worker_pod


def job(**options):
    return JobSpec.model_validate({"image": "team/job:1", "job_name": "digits", "num_workers": "2-4", **options})


def worker(**options):
    spec = job(**options)
    return finish_pod(with_pod_templates(worker_pod(spec, "lab"), spec, Role.WORKER), spec, Role.WORKER)


@pytest.fixture
def template(tmp_path, monkeypatch):
    """A function that writes a template; the option that names it comes back."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "pod.yaml").write_text(text)
        return {"pod_template": "pod.yaml"}

    return write


def container(pod):
    (only,) = pod["spec"]["containers"]
    return only


def environment(pod):
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container(pod)["env"]}


def field(path):
    return {"fieldRef": {"fieldPath": path}}


def secret(name, key):
    return {"secretKeyRef": {"name": name, "key": key}}


def test_a_worker_knows_its_master_its_address_and_its_papers():
    assert environment(worker()) == {
        "ELASTICDL_MASTER": "digits-master.lab.svc:50001",
        "ELASTICDL_MASTER_TIMEOUT": "600",
        "ELASTICDL_HOST": field("status.podIP"),
        "ELASTICDL_PLACE": field("metadata.name"),
        "ELASTICDL_NODE": field("spec.nodeName"),
        "ELASTICDL_JOB_SPEC": "/etc/elasticdl/job/job.json",
        "ELASTICDL_TLS": "/etc/elasticdl/tls",
        "HOME": "/tmp",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }
    assert environment(worker(envs="PYTHONHASHSEED=7"))["PYTHONHASHSEED"] != "0"
    assert container(worker())["command"] == ["python", "-P", "-m", "elasticdl.places.agent"]
    assert container(worker(command=("python", "train.py"))) == container(worker()), "the agent starts the user's"


@pytest.mark.parametrize("pod", [lambda: master_pod(job()), worker], ids=["master", "worker"])
def test_no_module_of_the_working_directory_is_imported_in_the_place_of_another(pod):
    """There a model zoo may have a `queue.py`, or the older ElasticDL's folder `elasticdl`."""
    assert container(pod())["command"][:3] == ["python", "-P", "-m"]


def test_the_users_variables_are_in_secrets_whoever_may_look_at_pods():
    pod = worker(envs="A=hush,HOME=/hush", env_from_secret="aws,TOKEN=hub/token")
    found = environment(pod)
    assert [found[each] for each in ("A", "HOME")] == [secret("digits-envs", "A"), secret("digits-envs", "HOME")]
    assert found["TOKEN"] == secret("hub", "token")
    assert len(container(pod)["env"]) == len(found)
    assert container(pod)["envFrom"] == [{"secretRef": {"name": "aws"}}]
    assert "hush" not in json.dumps(pod)
    assert "envFrom" not in container(worker())


NOT_READY, UNREACHABLE = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"


def tolerated(pod):
    """What a pod bears of a node, and for how long."""
    return [(each.get("key"), each.get("tolerationSeconds")) for each in pod["spec"]["tolerations"]]


def test_a_pod_is_not_left_on_a_lost_node_for_five_minutes():
    pod = worker(node_timeout=7)
    assert tolerated(pod) == [(NOT_READY, 7), (UNREACHABLE, 7)]
    assert {(each["operator"], each["effect"]) for each in pod["spec"]["tolerations"]} == {("Exists", "NoExecute")}


@pytest.mark.parametrize(
    ("toleration", "added"),
    [
        ({"key": "gpu"}, [(NOT_READY, 10), (UNREACHABLE, 10)]),
        ({"key": NOT_READY, "effect": "NoSchedule"}, [(NOT_READY, 10), (UNREACHABLE, 10)]),
        ({"key": NOT_READY, "tolerationSeconds": 600}, [(UNREACHABLE, 10)]),
        ({}, []),
    ],
)
def test_of_a_lost_node_the_users_own_word_counts(template, toleration, added):
    pod = worker(**template(json.dumps({"spec": {"tolerations": [{"operator": "Exists", **toleration}]}})))
    assert tolerated(pod)[1:] == added


def test_a_pod_has_no_rights_on_its_node():
    pod = worker()
    assert pod["spec"]["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container(pod)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert pod["spec"]["restartPolicy"] == "Never"


def test_it_has_its_certificate_the_specification_scratch_space_and_the_users_volumes():
    volume = "claim_name=data,mount_path=/data;claim_name=data,mount_path=/models,sub_path=m,read_only=true"
    pod = worker(volume=volume + ";host_path=/x,mount_path=/y,type=Directory")
    assert {each.pop("name"): each for each in copy.deepcopy(pod["spec"]["volumes"])} == {
        "tls": {"secret": {"secretName": "digits-worker-tls", "defaultMode": 0o444}},
        "job": {"configMap": {"name": "digits-spec", "defaultMode": 0o444}},
        "tmp": {"emptyDir": {}},
        "shm": {"emptyDir": {"medium": "Memory"}},
        "volume-0": {"persistentVolumeClaim": {"claimName": "data"}},
        "volume-1": {"hostPath": {"path": "/x", "type": "Directory"}},
    }
    mounted = {each.pop("mountPath"): each for each in copy.deepcopy(container(pod)["volumeMounts"])}
    assert mounted == {
        "/etc/elasticdl/tls": {"name": "tls", "readOnly": True},
        "/etc/elasticdl/job": {"name": "job", "readOnly": True},
        "/tmp": {"name": "tmp"},
        "/dev/shm": {"name": "shm"},
        "/data": {"name": "volume-0"},
        "/models": {"name": "volume-0", "readOnly": True, "subPath": "m"},
        "/y": {"name": "volume-1"},
    }


def test_a_volume_takes_the_place_of_the_pods_own_scratch_space():
    pod = worker(volume="host_path=/big,mount_path=/tmp")
    assert [each["name"] for each in container(pod)["volumeMounts"] if each["mountPath"] == "/tmp"] == ["volume-0"]
    assert "tmp" not in [each["name"] for each in pod["spec"]["volumes"]]


def test_resources_policy_grace_and_labels():
    resources = {"worker_resource_request": "cpu=1500m,gpu=1", "worker_resource_limit": "cpu=2500m"}
    pod = worker(**resources, image_pull_policy="Always", stop_grace=20.5, elastic=True)
    assert container(pod)["resources"] == {
        "requests": {"cpu": "1500m", "nvidia.com/gpu": "1"},
        "limits": {"cpu": "2500m", "nvidia.com/gpu": "1"},
    }
    assert environment(pod)["OMP_NUM_THREADS"] == "3"
    assert container(pod)["imagePullPolicy"] == "Always"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 31
    assert pod["metadata"]["labels"] == {
        "app.kubernetes.io/name": "elasticdl",
        "elasticdl.org/job": "digits",
        "elasticdl.org/role": "worker",
        "elastic": "true",
    }
    assert "imagePullPolicy" not in container(worker())


KUEUE, VOLCANO, GANG = "kueue.x-k8s.io/", "scheduling.volcano.sh/", {"gang": True, "num_workers": "3"}
GROUP = "digits-workers"
OF_KUEUES = {f"{KUEUE}pod-group-total-count": "3", f"{KUEUE}safe-to-forcefully-delete": "true"}
OF_VOLCANOS = {f"{VOLCANO}group-min-member": "3", "scheduling.k8s.io/group-name": GROUP}


@pytest.mark.parametrize(
    ("options", "labels", "annotations", "scheduler"),
    [
        ({}, {}, {}, None),
        ({"queue": "kueue=a"}, {f"{KUEUE}queue-name": "a"}, {}, None),
        ({"queue": "kueue=a", **GANG}, {f"{KUEUE}queue-name": "a", f"{KUEUE}pod-group-name": GROUP}, OF_KUEUES, None),
        ({"queue": "volcano=a"}, {}, {f"{VOLCANO}queue-name": "a"}, "volcano"),
        ({"queue": "volcano=a", **GANG}, {}, {f"{VOLCANO}queue-name": "a", **OF_VOLCANOS}, "volcano"),
    ],
)
def test_queues_know_the_workers(options, labels, annotations, scheduler):
    pod, plain = worker(**options), worker()
    assert pod["metadata"]["labels"] == {**plain["metadata"]["labels"], **labels}
    assert pod["metadata"].get("annotations", {}) == annotations
    assert pod["spec"].get("schedulerName") == scheduler


TEMPLATE = """
metadata:
  labels: {team: vision, elasticdl.org/job: stolen}
  annotations: {note: mine}
spec:
  nodeSelector: {zone: a}
  imagePullSecrets: [{name: registry}]
  tolerations: [{key: gpu, operator: Exists}]
  automountServiceAccountToken: null
  securityContext: {fsGroup: 1000}
  volumes:
  - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
  - {name: cache, emptyDir: {}}
  containers:
  - name: elasticdl
    env: [{name: HOME, value: /cache}, {name: NEW, value: "1"}]
    volumeMounts: [{name: cache, mountPath: /cache}]
  - {name: sidecar, image: side/car}
"""


def test_the_users_template_is_merged_into_every_pod(template):
    pod = worker(**template("apiVersion: v1\nkind: Pod\n" + TEMPLATE))
    main, sidecar = pod["spec"]["containers"]
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    env = {each["name"]: each.get("value") for each in main["env"]}
    assert (pod["metadata"]["labels"]["team"], pod["metadata"]["labels"]["elasticdl.org/job"]) == ("vision", "digits")
    assert pod["metadata"]["annotations"] == {"note": "mine"}
    assert pod["spec"]["nodeSelector"] == {"zone": "a"}
    assert pod["spec"]["securityContext"].items() >= {"fsGroup": 1000, "runAsNonRoot": True}.items()
    assert "automountServiceAccountToken" not in pod["spec"]
    assert volumes["tmp"] == {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}
    assert list(volumes) == ["tls", "job", "tmp", "shm", "cache"]
    assert (env["HOME"], env["NEW"], env["PYTHONUNBUFFERED"]) == ("/cache", "1", "1")
    assert main["image"] == "team/job:1"
    assert main["volumeMounts"][-1] == {"name": "cache", "mountPath": "/cache"}
    assert sidecar == {"name": "sidecar", "image": "side/car"}


def test_a_role_has_a_template_of_its_own_which_comes_last(tmp_path):
    for name, zone in (("all", "a"), ("worker", "b"), ("master", "c")):
        (tmp_path / name).write_text(f"spec: {{nodeSelector: {{zone: {zone}}}, hostAliases: [{{ip: {name}}}]}}")
    options = {"pod_template": "all", "worker_pod_template": "worker", "master_pod_template": "master"}
    spec = job(**{option: str(tmp_path / name) for option, name in options.items()})
    for role, zone in ((Role.WORKER, "b"), (Role.MASTER, "c")):
        pod = with_pod_templates({"metadata": {}, "spec": {}}, spec, role)
        assert pod["spec"]["nodeSelector"] == {"zone": zone}
        assert [alias["ip"] for alias in pod["spec"]["hostAliases"]] == ["all", str(role)]


@pytest.mark.parametrize(
    ("base", "patch", "merged"),
    [
        ({"tolerations": [{"key": 1}]}, {"tolerations": [{"key": 2}]}, {"tolerations": [{"key": 1}, {"key": 2}]}),
        ({"env": [{"name": "A", "value": "1"}]}, *[{"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]}] * 2),
    ],
    ids=["a list grows", "a variable has one value"],
)
def test_merging_changes_neither_side(base, patch, merged):
    before = copy.deepcopy((base, patch))
    assert merge(base, patch) == merged
    assert (base, patch) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("spec: {containers: {name: x}}", ": spec.containers must be a list, not {'name': 'x'}"),
        ("spec: {containers: [{image: x}]}", ": spec.containers[0] must be a mapping with name"),
        ("spec: {tolerations: x}", ": spec.tolerations must be a list, not 'x'"),
        ("spec: {securityContext: 7}", ": spec.securityContext must be a mapping, not 7"),
        ("spec: {$patch: replace}", ": spec.$patch: directives are not understood; leave it out"),
        ("- a", "must be a mapping with metadata and spec, as in a pod"),
        ("nodeSelector: {}", ": nodeSelector is no part of a pod; put it below metadata or spec"),
        ("spec: 3", ": spec must be a mapping"),
        ("spec: {restartPolicy: Always}", ": spec.restartPolicy must be Never: the master itself replaces workers"),
        ("metadata: {name: x}", ": metadata.name must be left out, as each pod has a name of its own"),
        ("a: b: c", "is not YAML: mapping values are not allowed here"),
    ],
)
def test_a_wrong_template_is_one_line(template, content, message):
    with pytest.raises(UserError, match=r"^--pod_template pod.yaml") as caught:
        worker(**template(content))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_container_beside_the_masters_is_refused_unless_kubernetes_ends_it(tmp_path):
    beside = "[{name: elasticdl}, {name: mesh, image: m}]"
    (tmp_path / "beside").write_text(f"spec: {{containers: {beside}}}")
    (tmp_path / "native").write_text(f"spec: {{initContainers: {beside}}}")
    made = {"spec": {"containers": [{"name": "elasticdl"}]}}
    both = job(pod_template=str(tmp_path / "beside"))
    assert len(with_pod_templates(made, both, Role.WORKER)["spec"]["containers"]) == 2
    with pytest.raises(
        UserError, match=r"beside: a container beside the master's would keep the Job from ending: make it"
    ):
        with_pod_templates(made, both, Role.MASTER)
    with_pod_templates(made, job(pod_template=str(tmp_path / "native")), Role.MASTER)


def test_a_template_is_a_file_and_the_masters_account_is_not_named_in_it(tmp_path):
    assert with_pod_templates({"spec": {}}, job(), Role.WORKER) == {"spec": {}}
    with pytest.raises(UserError, match="--pod_template /no/such: No such file or directory"):
        with_pod_templates({}, job(pod_template="/no/such"), Role.WORKER)
    (tmp_path / "pod.yaml").write_text("spec: {serviceAccountName: me}")
    with pytest.raises(UserError, match=r"^--master_pod_template .*: name the master's account with --service_account"):
        with_pod_templates({}, job(master_pod_template=str(tmp_path / "pod.yaml")), Role.MASTER)


def test_the_interface_of_an_address():
    assert interface_of("127.0.0.1") == interface_of("127.3.2.1") == "lo"
    with pytest.raises(UserError, match=r"no network interface of this machine has the address 203\.0\.113\.7"):
        interface_of("203.0.113.7")
