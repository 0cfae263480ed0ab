"""The languages of demands on a cluster: what they mean, and one line for each mistake."""

import re

import pytest
from refusal_kit import refused

from elasticdl.job import quantities as q

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
