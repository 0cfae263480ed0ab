"""What a job on a cluster is made of: its pods, what is around them, and how the user's own template is merged in. All of it is pure."""

import functools
import json
import re
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from importlib.resources import files

import pytest
import yaml
from jsonschema.validators import Draft202012Validator
from kubernetes_kit import PODS
from kubernetes_validate.utils import all_versions
from referencing import Registry, Resource
from refusal_kit import refused

from elasticdl.cli.cluster_run import make_parts
from elasticdl.job import quantities as q
from elasticdl.job.quantities import parse_priority
from elasticdl.job.spec import JobSpec
from elasticdl.kube import manifests
from elasticdl.places.worker_pods import WorkerPods, owner_references

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def job(**options):
    return JobSpec.model_validate({"image": "team/job:1", "job_name": "digits", "num_workers": "2-4", **options})


def parts(**options):
    return make_parts(job(**options), "lab", NOW)


# A worker's pod, if nothing is asked for: it knows its master, its own address and its papers, and has no rights on its node.
# With -P no module of the working directory is imported in the place of another, as a model zoo's `queue.py`.
WORKER = """
metadata:
  labels: {app.kubernetes.io/name: elasticdl, elasticdl.org/job: digits, elasticdl.org/role: worker}
spec:
  restartPolicy: Never
  enableServiceLinks: false
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 40
  securityContext: {runAsNonRoot: true, seccompProfile: {type: RuntimeDefault}}
  containers:
  - name: elasticdl
    image: team/job:1
    command: [python, -P, -m, elasticdl.places.agent]
    env:
    - {name: ELASTICDL_MASTER, value: 'digits-master.lab.svc:50001'}
    - {name: ELASTICDL_MASTER_TIMEOUT, value: '600'}
    - {name: ELASTICDL_HOST, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
    - {name: ELASTICDL_PLACE, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    - {name: ELASTICDL_NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
    - {name: PYTHONHASHSEED, value: '0'}
    - {name: HOME, value: /tmp}
    - {name: PYTHONUNBUFFERED, value: '1'}
    - {name: ELASTICDL_JOB_SPEC, value: /etc/elasticdl/job/job.json}
    - {name: ELASTICDL_TLS, value: /etc/elasticdl/tls}
    resources: {requests: {cpu: '1', memory: 4096Mi}}
    volumeMounts:
    - {name: tls, mountPath: /etc/elasticdl/tls, readOnly: true}
    - {name: job, mountPath: /etc/elasticdl/job, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    - {name: shm, mountPath: /dev/shm}
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
    terminationMessagePolicy: FallbackToLogsOnError
  volumes:
  - {name: tls, secret: {secretName: digits-worker-tls, defaultMode: 0o444}}
  - {name: job, configMap: {name: digits-spec, defaultMode: 0o444}}
  - {name: tmp, emptyDir: {}}
  - {name: shm, emptyDir: {medium: Memory}}
  tolerations:
  - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 10}
  - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 10}
""".replace("0o444", str(0o444))


def test_the_pod_of_a_worker():
    assert parts().worker == yaml.safe_load(WORKER)
    assert parts(command=("python", "train.py")).worker == parts().worker, "the agent starts the user's program"
    several = parts(command=("python", "train.py"), processes_per_worker=2, worker_resource_limit="cpu=5").worker
    env = several["spec"]["containers"][0]["env"]
    assert {"name": "OMP_NUM_THREADS", "value": "3"} in env, "they share the processors"


# Options of a job, and what comes of them: where in which object, and what stands there. An empty place: the options above.
MADE = """
| master container command 0 = python | master container command 1 = -P | master spec serviceAccountName = digits-master
envs="A=hush,HOME=/hush" env_from_secret="aws,TOKEN=hub/token"
| worker container env A = {secretKeyRef: {name: digits-envs, key: A}}
| worker container env HOME = {secretKeyRef: {name: digits-envs, key: HOME}}
| worker container env TOKEN = {secretKeyRef: {name: hub, key: token}}
| worker container envFrom = [{secretRef: {name: aws}}]
node_timeout=7 | worker spec tolerations node.kubernetes.io/not-ready tolerationSeconds = 7
| worker spec tolerations node.kubernetes.io/unreachable tolerationSeconds = 7
volume="claim_name=data,mount_path=/data;claim_name=data,mount_path=/m,sub_path=m,read_only=true;host_path=/x,mount_path=/y,type=Directory"
| worker spec volumes volume-0 = {persistentVolumeClaim: {claimName: data}}
| worker spec volumes volume-1 = {hostPath: {path: /x, type: Directory}} | worker spec volumes volume-2 = null
| worker container volumeMounts /data = {name: volume-0} | worker container volumeMounts /y = {name: volume-1}
| worker container volumeMounts /m = {name: volume-0, readOnly: true, subPath: m}
volume="host_path=/big,mount_path=/tmp" | worker container volumeMounts /tmp = {name: volume-0} | worker spec volumes tmp = null
worker_resource_request="cpu=1500m,gpu=1" worker_resource_limit="cpu=2500m"
| worker container resources = {requests: {cpu: 1500m, nvidia.com/gpu: '1'}, limits: {cpu: 2500m, nvidia.com/gpu: '1'}}
| worker container env OMP_NUM_THREADS = '3'
image_pull_policy=Always elastic=true | worker container imagePullPolicy = Always | worker metadata labels elastic = 'true'
service_account=me | master spec serviceAccountName = me | kinds = [ConfigMap, NetworkPolicy, Secret, Service]
ttl=60 | job spec ttlSecondsAfterFinished = 60 | applied spec ttlSecondsAfterFinished = null
ttl=0 | job spec ttlSecondsAfterFinished = null
| job spec backoffLimit = 100 | job spec podFailurePolicy = null
worker_pod_priority=high master_pod_priority=higher | master spec priorityClassName = higher
pod_template="spec: {serviceAccountName: cloud, automountServiceAccountToken: null}"
| worker spec serviceAccountName = cloud | master spec serviceAccountName = digits-master
| worker spec automountServiceAccountToken = null | master spec automountServiceAccountToken = true
pod_template="spec: {tolerations: [{operator: Exists, key: node.kubernetes.io/not-ready, effect: NoSchedule}]}"
| tolerated = [node.kubernetes.io/not-ready, 10 node.kubernetes.io/not-ready, 10 node.kubernetes.io/unreachable]
pod_template="spec: {tolerations: [{operator: Exists, key: node.kubernetes.io/not-ready, tolerationSeconds: 600}]}"
| tolerated = [600 node.kubernetes.io/not-ready, 10 node.kubernetes.io/unreachable]
pod_template="spec: {tolerations: [{operator: Exists}]}" | tolerated = [all]
pod_template="spec: {nodeSelector: {zone: a}}" worker_pod_template="spec: {nodeSelector: {zone: b}}"
| worker spec nodeSelector zone = b | master spec nodeSelector zone = a
pod_template="spec: {initContainers: [{name: mesh, image: m}]}" | master spec initContainers mesh = {image: m}
worker_pod_template="{metadata: {labels: {team: vision, elasticdl.org/job: stolen}, annotations: {note: mine}}, spec: {automountServiceAccountToken: null, \
securityContext: {fsGroup: 1000}, volumes: [{name: tmp, emptyDir: {sizeLimit: 1Gi}}, {name: cache, emptyDir: {}}], containers: [{name: elasticdl, \
env: [{name: HOME, value: /cache}, {name: NEW, value: '1'}], volumeMounts: [{name: cache, mountPath: /c}]}, {name: sidecar, image: s}]}}"
| worker metadata labels team = vision | worker metadata labels elasticdl.org/job = digits | worker metadata annotations = {note: mine}
| worker spec automountServiceAccountToken = null | worker spec securityContext fsGroup = 1000 | worker spec securityContext runAsNonRoot = true
| worker spec volumes tmp emptyDir = {sizeLimit: 1Gi} | worker spec volumes 4 name = cache | worker spec volumes 5 = null
| worker container env HOME = /cache | worker container env NEW = '1' | worker container env PYTHONUNBUFFERED = '1'
| worker container volumeMounts /c name = cache | worker container volumeMounts /tmp name = tmp
| worker spec containers sidecar = {image: s} | worker container image = team/job:1
queue=kueue=a | worker metadata labels kueue.x-k8s.io/queue-name = a | worker metadata annotations = null
| worker spec schedulerName = null | PodGroup = null
queue=kueue=a gang=true num_workers=3 | worker metadata labels kueue.x-k8s.io/pod-group-name = digits-workers
| worker metadata annotations = {kueue.x-k8s.io/pod-group-total-count: '3', kueue.x-k8s.io/safe-to-forcefully-delete: 'true'}
| worker metadata labels kueue.x-k8s.io/queue-name = a | PodGroup = null
| Role rules pods verbs = [create, delete, deletecollection, get, list, patch, watch]
queue=volcano=a | worker metadata annotations = {scheduling.volcano.sh/queue-name: a} | worker spec schedulerName = volcano
| PodGroup = null
queue=volcano=a gang=true num_workers=3 | worker metadata annotations scheduling.k8s.io/group-name = digits-workers
| worker metadata annotations scheduling.volcano.sh/group-min-member = '3' | worker spec schedulerName = volcano
| worker metadata annotations scheduling.volcano.sh/queue-name = a | PodGroup metadata name = digits-workers
| PodGroup apiVersion = scheduling.volcano.sh/v1beta1 | PodGroup spec = {minMember: 3, queue: a}
gang=true num_workers=3 | PodGroup = null
queue=volcano=a gang=true num_workers=3 worker_pod_priority=high | PodGroup spec priorityClassName = high
queue=volcano=a gang=true num_workers=3 pod_template="spec: {priorityClassName: of-it}" | PodGroup spec priorityClassName = of-it
"""


def titles(item):
    """What an item of a list is called."""
    return [item[key] for key in ("mountPath", "name", "key") if key in item] or [" ".join(item.get("resources", ()))]


def at(node, words):
    """What stands there; of an item of a list without its title, and of a variable its value."""
    for word in words:
        if isinstance(node, list) and not word.isdigit():
            item = next((each for each in node if titles(each)[0] == word), {})
            node = {name: value for name, value in item.items() if value != word} or None
            node = next(iter(node.values())) if node and node.keys() in ({"value"}, {"valueFrom"}) else node
        elif node is not None:
            node = dict(enumerate(node)).get(int(word)) if isinstance(node, list) else node.get(word)
    return node


def objects(made):
    around = manifests.companions(made)
    borne = [(each.get("tolerationSeconds", ""), each.get("key", "all")) for each in made.worker["spec"]["tolerations"]]
    return {
        **{each["kind"]: each for each in around},
        "worker": {**made.worker, "container": made.worker["spec"]["containers"][0]},
        "master": {**made.master, "container": made.master["spec"]["containers"][0]},
        "job": manifests.make_job(made, submitted=True),
        "applied": manifests.make_job(made),
        "kinds": sorted({each["kind"] for each in around}),
        "tolerated": [f"{seconds} {key}".strip() for seconds, key in borne],
    }


@pytest.mark.parametrize("row", re.split(r"\n(?!\| )", MADE.strip()))
def test_what_comes_of_the_options_of_a_job(row, tmp_path):
    options, *rows = (part.strip() for part in re.split(r"(?:^|\s)\| ", row.replace("\n", " ")))
    given = dict(word.split("=", 1) for word in shlex.split(options))
    for name in [name for name in given if name.endswith("template")]:
        (tmp_path / name).write_text(given[name])
        given[name] = str(tmp_path / name)
    made = objects(parts(**given))
    found = {where: at(made, where.split()) for where, _, _ in (each.partition(" = ") for each in rows)}
    assert found == {each.partition(" = ")[0]: yaml.safe_load(each.partition(" = ")[2]) for each in rows}


def test_values_of_variables_are_in_a_secret_of_the_job_and_nowhere_else():
    made = parts(envs="TOKEN=hush")
    holders = [each for each in manifests.companions(made) if "aHVzaA==" in json.dumps(each)]
    assert [(each["kind"], each["metadata"]["name"]) for each in holders] == [("Secret", "digits-envs")]
    assert "hush" not in json.dumps([*manifests.companions(made), manifests.make_job(made), made.worker])


@pytest.mark.parametrize("word", ["y", "1e3", "0o7", "null"])
def test_a_word_in_a_file_of_objects_is_a_word_for_every_reader(word):
    """PyYAML writes some without quotes that kubectl, by another version of YAML, takes for a truth value or a number."""
    content = {"metadata": {"labels": {"job": word, "same": word}}, "count": 1, "is": True}
    written = manifests.as_yaml([content])
    assert (written.count(f'"{word}"'), "count: 1\n" in written, yaml.safe_load(written)) == (2, True, content)


# ---- the user's template; how it is merged is above ----


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("spec: {containers: {name: x}}", ": spec.containers must be a list, not {'name': 'x'}"),
        ("spec: {securityContext: 7}", ": spec.securityContext must be a mapping, not 7"),
        ("spec: {$patch: replace}", ": spec.$patch: directives are not understood; leave it out"),
        ("- a", "must be a mapping with metadata and spec, as in a pod"),
        ("nodeSelector: {}", ": nodeSelector is no part of a pod; put it below metadata or spec"),
        ("spec: {restartPolicy: Always}", ": spec.restartPolicy must be Never: the master itself replaces workers"),
        ("metadata: {name: x}", ": metadata.name must be left out, as each pod has a name of its own"),
        ("a: b: c", "is not YAML: mapping values are not allowed here"),
        ("spec: {containers: [{name: elasticdl}, {name: mesh}]}", ": a container beside the master's would keep the "),
        ("spec: {serviceAccountName: me}", ": name the master's account with --service_account"),
        (None, ": No such file or directory"),
    ],
)
def test_a_wrong_template_of_the_master_is_one_line(tmp_path, monkeypatch, content, told):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "pod.yaml").write_text(content)
    refused(rf"^--master_pod_template pod.yaml.*{re.escape(told)}", lambda: parts(master_pod_template="pod.yaml"))


# ---- from which Kubernetes on all of it is valid: by each release's own schemas, which refuse fields unknown to it ----

OLDEST, NEWEST = 26, 37
MUCH = {"worker_resource_request": "cpu=4,memory=8Gi,gpu=1", "volume": "claim_name=data,mount_path=/data"}
MUCH |= {"envs": "A=1", "env_from_secret": "aws,TOKEN=hub/token", "queue": "kueue=lab"}


@functools.cache
def resource(version, name):
    file = files("kubernetes_validate") / f"kubernetes-json-schema/v{version}-local-strict/{name}.json"
    return Resource.from_contents(json.loads(file.read_text()))


def faults(version, manifest):
    group, _, release = manifest["apiVersion"].rpartition("/")
    schema = resource(version, "-".join([manifest["kind"].lower(), *([group.split(".")[0]] if group else []), release]))
    registry = resource(version, "_definitions") @ Registry()
    found = Draft202012Validator(schema.contents, registry=registry).iter_errors(manifest)
    return [f"{manifest['kind']}: {'.'.join(map(str, fault.path))}: {fault.message}" for fault in found]


def test_the_manifests_are_valid_from_the_oldest_to_the_newest_release():
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "digits-master", "uid": "j"}}
    state = {"metadata": {"name": "digits-state", "uid": "s", "ownerReferences": [{"uid": "j"}]}}
    made, owners, priority = parts(**MUCH), owner_references(job, state), parse_priority("high=0.5")
    around = manifests.companions(made)
    pods = WorkerPods("digits", "lab", owners, made.worker, PODS.limits, priority)
    each = [manifests.make_job(made), *around, *(manifests.owned(one, job) for one in around)]
    each.append(pods.manifest(0, 0, away_from=("n1", "n2")))
    assert len({one["kind"] for one in each}) == 9
    known = {int(version.split(".")[1]): version for version in all_versions()}
    for minor in range(OLDEST, NEWEST + 1):
        assert [fault for one in each for fault in faults(known[minor], one)] == [], f"1.{minor}"
    assert faults(known[OLDEST], {**each[0], "newer": 1}) != [], "a field that a release does not know is a fault"


def test_a_pod_that_avoids_nodes_keeps_what_its_template_wants():
    preferred, own = "preferredDuringSchedulingIgnoredDuringExecution", {"weight": 1, "preference": {}}
    wanted = {"podAffinity": {"a": 1}, "nodeAffinity": {"required": 1, preferred: [own]}}
    template = {**PODS.template, "spec": {**PODS.template["spec"], "affinity": wanted}}
    made = replace(PODS, template=template).manifest(0, 0, away_from=("n1",))["spec"]["affinity"]
    *terms, added = made["nodeAffinity"].pop(preferred)
    assert made == {"podAffinity": {"a": 1}, "nodeAffinity": {"required": 1}}
    assert (terms, "n1" in str(added)) == ([own], True)


# ---- the languages of demands on a cluster: what they mean, and one line for each mistake ----

DISKS = "claim_name=a,mount_path=/data/x,sub_path=mnist,read_only=true; host_path=/s,mount_path=/t,type=Directory;"
CLAIMED = q.Volume(mount_path="/data/x", claim_name="a", sub_path="mnist", read_only=True)
RESOURCES = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1", "ephemeral-storage": "5G", "amd.com/gpu": "2"}
NO_QUANTITIES = [
    "cpu=1Gi",
    "memory=8 Gi",
    *(f"memory={text}" for text in ["400m", "1e", "K", "٣", "8GiB", "8K", "-1", "+1", "1.2.3"]),
]
EITHER = "give either claim_name, of a PersistentVolumeClaim, or host_path"
OWN = "is set by elasticdl itself; leave it out"

# What each makes of a text: a value, or the beginning of what is said of a mistake.
TEXTS = {
    q.parse_resources: {
        "cpu=4, memory=8Gi,gpu=1,disk=5G,amd.com/gpu=2,hugepages-2Mi=4Mi": {**RESOURCES, "hugepages-2Mi": "4Mi"},
        "": {},
        **{f"cpu={text}": {"cpu": text} for text in (".5", "500m", "1e3", "5E-1")},
        **{f"memory={text}": {"memory": text} for text in ("8", "1.5G", "1k", "2E", "1e3", "5E-1")},
        **{text: f"{text} is no quantity: write it as in cpu=0.5" for text in NO_QUANTITIES},
        "cpu=4,": "'' is not KEY=VALUE; write it as in cpu=4",
        "cpu=1,cpu=2": "cpu is given twice; leave one out",
    },
    q.parse_volumes: {
        DISKS: (CLAIMED, q.Volume(mount_path="/t", host_path="/s", type="Directory")),
        "": (),
        "data": "'data' is not KEY=VALUE; write it as in claim_name=data",
        "mount_path=/data": f"mount_path=/data: {EITHER}",
        "claim_name=a,host_path=/b,mount_path=/data": f"claim_name=a,host_path=/b,mount_path=/data: {EITHER}",
        "claim_name=a": "claim_name=a: mount_path: Field required",
        "claim=a,mount_path=/a": "claim=a,mount_path=/a: claim: Extra inputs are not permitted",
        "claim_name=a,mount_path=/a,read_only=maybe": "claim_name=a,mount_path=/a,read_only=maybe: read_only: Input sh",
    },
    q.parse_secret_envs: {
        "aws, TOKEN=hub.a/b-1": (q.SecretEnv("aws"), q.SecretEnv("hub.a", "TOKEN", "b-1")),
        **{text: f"{text!r} names no Secret: " for text in ("TOKEN=hub", "hub/token", "TOKEN=hub/", "=hub/a")},
        "ELASTICDL_TLS=hub/x": f"ELASTICDL_TLS {OWN}",
    },
    q.parse_envs: {
        "A=1,B=x=y, C=one\\,two": {"A": "1", "B": "x=y", "C": "one,two"},
        "A": "'A' is not KEY=VALUE; write it as in NAME=VALUE",
        "ELASTICDL_MASTER=x": f"ELASTICDL_MASTER {OWN}",
    },
    q.parse_priority: {
        "": None,
        "urgent": q.Priority("urgent"),
        "0.5": q.Priority("high", 0.5),
        "gpu-high=0.25": q.Priority("gpu-high", 0.25),
        **{f"{name}{text}": f"'{text}' is no share" for name, text in (("high=", "1.5"), ("", "-0.5"))},
    },
    q.parse_queue: {
        "": None,
        "kueue=team-a": q.Queue("kueue", "team-a"),
        **{text: f"{text}: must be kueue=QUEUE or volcano=QUEUE" for text in ("slurm=a", "kueue")},
    },
}


ROWS = [(parse, *each) for parse, cases in TEXTS.items() for each in cases.items()]


@pytest.mark.parametrize(("parse", "text", "meant"), ROWS)
def test_what_is_written_is_understood_and_a_mistake_is_one_line(parse, text, meant):
    if isinstance(meant, str):
        refused(f"^{re.escape(meant)}", lambda: parse(text), ValueError)
    else:
        assert parse(text) == meant


def test_processors_are_counted_and_devices_requested_as_limited():
    assert [q.processors(text) for text in ("4", ".5", "500m", "1e3", "5E-1")] == [4, 0.5, 0.5, 1000, 0.5]
    assert q.requirements("cpu=1,gpu=1", "memory=1Gi,amd.com/gpu=2") == {
        "requests": {"cpu": "1", "nvidia.com/gpu": "1", "amd.com/gpu": "2"},
        "limits": {"memory": "1Gi", "nvidia.com/gpu": "1", "amd.com/gpu": "2"},
    }
    # Whoever contradicts himself hears so from the cluster.
    both = {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "2"}}
    assert (q.requirements("gpu=1", "gpu=2"), q.requirements("", "")) == (both, {})
