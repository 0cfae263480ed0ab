"""The languages of demands on a cluster: what they mean, and one line for each mistake."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.job.quantities import (
    Priority,
    Queue,
    SecretEnv,
    Volume,
    class_name,
    parse_envs,
    parse_priority,
    parse_quantity,
    parse_queue,
    parse_resources,
    parse_secret_envs,
    parse_volumes,
    requirements,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", "4"),
        ("0.5", "0.5"),
        (".5", "0.5"),
        ("500m", "0.5"),
        ("8Gi", str(8 * 1024**3)),
        ("8G", "8000000000"),
        ("1k", "1000"),
        ("2E", "2000000000000000000"),
        ("1e3", "1000"),
        ("5E-1", "0.5"),
    ],
)
def test_quantities(text, value):
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "8gb", "8 Gi", "8GiB", "-1", "+1", "1e", "K", "1.2.3", "٣", "8K"])
def test_no_quantities(text):
    with pytest.raises(ValueError, match="is no quantity: write a number"):
        parse_quantity(text)


def test_resources():
    text = "cpu=4, memory=8Gi,gpu=1,disk=5G,amd.com/gpu=2,hugepages-2Mi=4Mi"
    assert parse_resources(text) == {
        "cpu": "4",
        "memory": "8Gi",
        "nvidia.com/gpu": "1",
        "ephemeral-storage": "5G",
        "amd.com/gpu": "2",
        "hugepages-2Mi": "4Mi",
    }
    assert parse_resources("") == {}


def test_devices_are_requested_as_limited():
    assert requirements("cpu=1,gpu=1", "memory=1Gi,amd.com/gpu=2") == {
        "requests": {"cpu": "1", "nvidia.com/gpu": "1", "amd.com/gpu": "2"},
        "limits": {"memory": "1Gi", "nvidia.com/gpu": "1", "amd.com/gpu": "2"},
    }
    assert requirements("gpu=1", "gpu=1")["limits"] == {"nvidia.com/gpu": "1"}
    assert requirements("", "") == {}
    for own in ("requests", "limits"):  # whoever contradicts himself hears so from the cluster
        assert requirements("gpu=1", "gpu=2")[own] == {"nvidia.com/gpu": "1" if own == "requests" else "2"}


def test_volumes():
    text = "claim_name=data,mount_path=/data,sub_path=mnist,read_only=true; host_path=/s,mount_path=/scratch,type=Directory;"
    assert parse_volumes(text) == (
        Volume("/data", claim_name="data", sub_path="mnist", read_only=True),
        Volume("/scratch", host_path="/s", host_path_type="Directory"),
    )
    assert parse_volumes("") == ()


def test_envs():
    assert parse_envs("A=1,B=x=y, C=one\\,two") == {"A": "1", "B": "x=y", "C": "one,two"}
    assert parse_envs("") == {}


def test_a_path_has_one_spelling():
    assert [volume.mount_path for volume in parse_volumes("host_path=/a,mount_path=//data/./x/")] == ["/data/x"]


def test_variables_from_secrets():
    assert parse_secret_envs("aws, TOKEN=hub.team/token-1") == (
        SecretEnv("aws"),
        SecretEnv("hub.team", "TOKEN", "token-1"),
    )
    assert parse_secret_envs("") == ()


def test_priorities():
    assert parse_priority("") is None
    assert parse_priority("urgent") == Priority("urgent")
    assert parse_priority("0.5") == Priority("high", 0.5)
    assert parse_priority("gpu-high=0.25") == Priority("gpu-high", 0.25)
    assert class_name("urgent") == "urgent"
    assert class_name("") == ""


def test_queues():
    assert parse_queue("kueue=team-a") == Queue("kueue", "team-a")
    assert parse_queue("") is None


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_resources, "cpu", "'cpu' is not KEY=VALUE; write it as in cpu=4,memory=8Gi,gpu=1"),
        (parse_resources, "cpu=4,", "'' is not KEY=VALUE; write it as in cpu=4,memory=8Gi,gpu=1"),
        (parse_resources, "cpu=1,cpu=2", "cpu is given twice; leave one out"),
        (
            parse_resources,
            "gpu=1,nvidia.com/gpu=2",
            "nvidia.com/gpu is given twice, as nvidia.com/gpu is the same: leave one out",
        ),
        (
            parse_resources,
            "memory=8gb",
            "memory=8gb: '8gb' is no quantity: write a number, with a suffix if you like, as in 0.5, 500m or 8Gi",
        ),
        (parse_resources, "memory=400m", "memory=400m is less than a byte or a part of one: did you mean 400Mi?"),
        (parse_volumes, "data", "'data' is not KEY=VALUE; write it as in claim_name=data,mount_path=/data"),
        (
            parse_volumes,
            "mount_path=/data",
            "mount_path=/data: give either claim_name, of a PersistentVolumeClaim, or host_path, a folder of the node",
        ),
        (
            parse_volumes,
            "claim_name=a,host_path=/b,mount_path=/data",
            "claim_name=a,host_path=/b,mount_path=/data: give either claim_name, of a PersistentVolumeClaim, or host_path, a folder of the node",
        ),
        (
            parse_volumes,
            "claim_name=a",
            "claim_name=a: mount_path is missing: say where in the pods the files are to appear",
        ),
        (parse_volumes, "claim_name=a,mount_path=data", "mount_path=data: must be an absolute path without .."),
        (parse_volumes, "claim_name=a,mount_path=/", "mount_path=/: is taken already; choose another"),
        (
            parse_volumes,
            "claim_name=a,mount_path=//etc//elasticdl/./tls/",
            "mount_path=/etc/elasticdl/tls: is taken already; choose another",
        ),
        *(
            (
                parse_secret_envs,
                text,
                f"{text!r} names no Secret: write SECRET for all of it, or NAME=SECRET/KEY for one variable",
            )
            for text in ("TOKEN=hub", "hub/token", "TOKEN=hub/", "=hub/a", "TOKEN=/a")
        ),
        (parse_secret_envs, "ELASTICDL_TLS=hub/x", "ELASTICDL_TLS is set by elasticdl itself; leave it out"),
        (parse_secret_envs, "A=hub/x,A=hub/y", "A is given twice; leave one out"),
        (
            parse_volumes,
            "claim_name=a,mount_path=/var/run/secrets/kubernetes.io",
            "mount_path=/var/run/secrets/kubernetes.io: is taken already; choose another",
        ),
        (parse_volumes, "host_path=/a/../b,mount_path=/x", "host_path=/a/../b: must be an absolute path without .."),
        (
            parse_volumes,
            "claim_name=a,mount_path=/a,type=File",
            "claim_name=a,mount_path=/a,type=File: type belongs to host_path, not to claim_name; leave it out",
        ),
        (
            parse_volumes,
            "claim=a,mount_path=/a",
            "claim is no part of a volume: use claim_name, host_path, mount_path, sub_path, type, read_only",
        ),
        (
            parse_volumes,
            "claim_name=a,mount_path=/a,read_only=maybe",
            "read_only=maybe: must be true or false",
        ),
        (parse_envs, "A", "'A' is not KEY=VALUE; write it as in NAME=VALUE,OTHER=VALUE"),
        (parse_envs, "ELASTICDL_MASTER=x", "ELASTICDL_MASTER is set by elasticdl itself; leave it out"),
        (parse_priority, "high=1.5", "'1.5' is no share of the workers: write a number from 0 to 1, as in high=0.5"),
        (parse_priority, "-0.5", "'-0.5' is no share of the workers: write a number from 0 to 1, as in high=0.5"),
        (class_name, "high=0.5", "high=0.5: there is one master only; name a PriorityClass"),
        (parse_queue, "slurm=a", "slurm=a: must be kueue=QUEUE or volcano=QUEUE"),
        (parse_queue, "kueue", "kueue: must be kueue=QUEUE or volcano=QUEUE"),
    ],
)
def test_a_mistake_is_one_line(parse, text, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        parse(text)
    assert str(caught.value) == message


@given(st.dictionaries(st.from_regex(r"[A-DF-Z][A-Z0-9_]{0,8}", fullmatch=True), st.text(min_size=1), max_size=4))
def test_any_value_can_be_written(envs):
    kept = {name: value for name, value in envs.items() if value.strip() == value and "\\" not in value}
    text = ",".join(f"{name}={value.replace(',', chr(92) + ',')}" for name, value in kept.items())
    assert parse_envs(text) == kept
