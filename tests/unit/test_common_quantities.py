"""The languages of demands on a cluster: what they mean, and one line for each mistake."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.job.quantities import (
    Priority,
    Queue,
    SecretEnv,
    Volume,
    parse_envs,
    parse_priority,
    parse_queue,
    parse_resources,
    parse_secret_envs,
    parse_volumes,
    processors,
    requirements,
)

PROCESSORS = {"4": 4, ".5": 0.5, "500m": 0.5, "1e3": 1000, "5E-1": 0.5}


@pytest.mark.parametrize(("text", "value"), PROCESSORS.items())
def test_processors(text, value):
    assert parse_resources(f"cpu={text}") == {"cpu": text}
    assert processors(text) == value


@pytest.mark.parametrize("text", ["8", "8Gi", "1.5G", "1k", "2E", "1e3", "5E-1"])
def test_quantities(text):
    assert parse_resources(f"memory={text}") == {"memory": text}


@pytest.mark.parametrize(
    "text",
    [
        "memory=400m",
        *(f"memory={each}" for each in ("8gb", "8 Gi", "8GiB", "-1", "+1", "1e", "K", "1.2.3", "٣", "8K")),
        "cpu=1Gi",
    ],
)
def test_no_quantities(text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)} is no quantity: write it as in cpu=0.5, cpu=500m or"):
        parse_resources(text)


RESOURCES = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "1", "ephemeral-storage": "5G"}
RESOURCES |= {"amd.com/gpu": "2", "hugepages-2Mi": "4Mi"}
DISKS = "claim_name=a,mount_path=/data/x,sub_path=mnist,read_only=true; host_path=/s,mount_path=/t,type=Directory;"
CLAIMED = Volume(mount_path="/data/x", claim_name="a", sub_path="mnist", read_only=True)
VOLUMES = (CLAIMED, Volume(mount_path="/t", host_path="/s", type="Directory"))


@pytest.mark.parametrize(
    ("parse", "text", "parsed"),
    [
        (parse_resources, "cpu=4, memory=8Gi,gpu=1,disk=5G,amd.com/gpu=2,hugepages-2Mi=4Mi", RESOURCES),
        (parse_resources, "", {}),
        (parse_volumes, DISKS, VOLUMES),
        (parse_volumes, "", ()),
        (parse_envs, "A=1,B=x=y, C=one\\,two", {"A": "1", "B": "x=y", "C": "one,two"}),
        (parse_envs, "", {}),
        (parse_secret_envs, "aws, TOKEN=hub.a/b-1", (SecretEnv("aws"), SecretEnv("hub.a", "TOKEN", "b-1"))),
        (parse_secret_envs, "", ()),
        (parse_priority, "", None),
        (parse_priority, "urgent", Priority("urgent")),
        (parse_priority, "0.5", Priority("high", 0.5)),
        (parse_priority, "gpu-high=0.25", Priority("gpu-high", 0.25)),
        (parse_queue, "kueue=team-a", Queue("kueue", "team-a")),
        (parse_queue, "", None),
    ],
)
def test_what_is_written_is_understood(parse, text, parsed):
    assert parse(text) == parsed


def test_devices_are_requested_as_limited():
    assert requirements("cpu=1,gpu=1", "memory=1Gi,amd.com/gpu=2") == {
        "requests": {"cpu": "1", "nvidia.com/gpu": "1", "amd.com/gpu": "2"},
        "limits": {"memory": "1Gi", "nvidia.com/gpu": "1", "amd.com/gpu": "2"},
    }
    assert requirements("gpu=1", "gpu=1")["limits"] == {"nvidia.com/gpu": "1"}
    assert requirements("", "") == {}
    for own in ("requests", "limits"):  # whoever contradicts himself hears so from the cluster
        assert requirements("gpu=1", "gpu=2")[own] == {"nvidia.com/gpu": "1" if own == "requests" else "2"}


NO_RESOURCE = "is not KEY=VALUE; write it as in cpu=4,memory=8Gi,gpu=1"
EITHER = "give either claim_name, of a PersistentVolumeClaim, or host_path, a folder of the node"
NO_SECRET = "names no Secret: write SECRET for all of it, or NAME=SECRET/KEY for one variable"
SHARE = "is no share of the workers: write a number from 0 to 1, as in high=0.5"
MISTAKES = {
    parse_resources: {
        "cpu": f"'cpu' {NO_RESOURCE}",
        "cpu=4,": f"'' {NO_RESOURCE}",
        "cpu=1,cpu=2": "cpu is given twice; leave one out",
    },
    parse_volumes: {
        "data": "'data' is not KEY=VALUE; write it as in claim_name=data,mount_path=/data",
        "mount_path=/data": f"mount_path=/data: {EITHER}",
        "claim_name=a,host_path=/b,mount_path=/data": f"claim_name=a,host_path=/b,mount_path=/data: {EITHER}",
        "claim_name=a": "claim_name=a: mount_path: Field required",
        "claim=a,mount_path=/a": "claim=a,mount_path=/a: claim: Extra inputs are not permitted",
        "claim_name=a,mount_path=/a,read_only=maybe": "claim_name=a,mount_path=/a,read_only=maybe: read_only: Input should be a valid boolean",
    },
    parse_secret_envs: {
        **{text: f"{text!r} {NO_SECRET}" for text in ("TOKEN=hub", "hub/token", "TOKEN=hub/", "=hub/a", "TOKEN=/a")},
        "ELASTICDL_TLS=hub/x": "ELASTICDL_TLS is set by elasticdl itself; leave it out",
    },
    parse_envs: {
        "A": "'A' is not KEY=VALUE; write it as in NAME=VALUE,OTHER=VALUE",
        "ELASTICDL_MASTER=x": "ELASTICDL_MASTER is set by elasticdl itself; leave it out",
    },
    parse_priority: {"high=1.5": f"'1.5' {SHARE}", "-0.5": f"'-0.5' {SHARE}"},
    parse_queue: {text: f"{text}: must be kueue=QUEUE or volcano=QUEUE" for text in ("slurm=a", "kueue")},
}


@pytest.mark.parametrize(
    ("parse", "text", "message"), [(parse, *each) for parse, cases in MISTAKES.items() for each in cases.items()]
)
def test_a_mistake_is_one_line(parse, text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@given(st.dictionaries(st.from_regex(r"[A-DF-Z][A-Z0-9_]{0,8}", fullmatch=True), st.text(min_size=1), max_size=4))
def test_any_value_can_be_written(envs):
    kept = {name: value for name, value in envs.items() if value.strip() == value and "\\" not in value}
    text = ",".join(f"{name}={value.replace(',', chr(92) + ',')}" for name, value in kept.items())
    assert parse_envs(text) == kept
