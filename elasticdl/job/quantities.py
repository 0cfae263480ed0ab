"""The forms in which options say what a job wants of a cluster, as in ElasticDL.

    resources   cpu=4,memory=8Gi,gpu=1,vendor.com/device=2
    volumes     claim_name=data,mount_path=/data;host_path=/scratch,mount_path=/scratch,type=Directory
    envs        NAME=VALUE,NAME=VALUE          a comma within a value is written \\,
    secrets     SECRET,NAME=SECRET/KEY
    priority    CLASS  |  0.5  |  CLASS=0.5
    queue       kueue=QUEUE  |  volcano=QUEUE

Checked here is the form alone, and what a cluster would accept though it is a mistake. When the job is submitted, the cluster
itself is asked about names, sizes and paths, before anything is made. Every function raises `ValueError` with one line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from elasticdl.common.errors import first_finding

GPU = "nvidia.com/gpu"
_SHORT = {"gpu": GPU, "disk": "ephemeral-storage"}
_NUMBER = r"(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,2})?"
# A thousandth of anything else is a mistake, of which a cluster only warns.
_PROCESSORS, _QUANTITY = (re.compile(_NUMBER + suffix, re.ASCII) for suffix in ("m?", "([KMGTPE]i|[kMGTPE])?"))
OWN_VARIABLES = "ELASTICDL_"
HIGH = "high"
KUEUE, VOLCANO = QUEUES = ("kueue", "volcano")


def processors(quantity: str) -> float:
    """How many these are, as in 4, 0.5 or 500m."""
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def parse_resources(text: str) -> dict[str, str]:
    """Kubernetes' names of resources, with their quantities as written."""
    found: dict[str, str] = {}
    for key, quantity in _pairs(text, "cpu=4,memory=8Gi,gpu=1").items():
        name = _SHORT.get(key, key)
        if not (_PROCESSORS if name == "cpu" else _QUANTITY).fullmatch(quantity):
            raise ValueError(f"{key}={quantity} is no quantity: write it as in cpu=0.5, cpu=500m or memory=8Gi")
        found[name] = quantity
    return found


def gpus_of(text: str) -> str:
    """How many, as written; empty if none are asked for."""
    return parse_resources(text).get(GPU, "")


def requirements(request: str, limit: str) -> dict[str, dict[str, str]]:
    """The ``resources`` of a container. Devices are requested as limited: a cluster takes them in no other way."""
    requests, limits = parse_resources(request), parse_resources(limit)
    for name, quantity in {**limits, **requests}.items():
        if "/" in name:
            requests.setdefault(name, quantity)
            limits.setdefault(name, quantity)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


class Volume(BaseModel):
    """Where files of a claim or of the node appear in every pod of the job."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mount_path: str
    claim_name: str = ""
    host_path: str = ""
    type: str = ""  # of the folder of the node
    sub_path: str = ""
    read_only: bool = False


def parse_volumes(text: str) -> tuple[Volume, ...]:
    return tuple(_parse_volume(part.strip()) for part in text.split(";") if part.strip())


def _parse_volume(text: str) -> Volume:
    try:
        volume = Volume.model_validate(_pairs(text, "claim_name=data,mount_path=/data"))
    except ValidationError as error:
        raise ValueError(f"{text}: {first_finding(error)}") from None
    if bool(volume.claim_name) == bool(volume.host_path):
        raise ValueError(
            f"{text}: give either claim_name, of a PersistentVolumeClaim, or host_path, a folder of the node"
        )
    return volume


def parse_envs(text: str) -> dict[str, str]:
    found = _pairs(text, "NAME=VALUE,OTHER=VALUE")
    for name in found:
        _require_users(name)
    return found


def _require_users(name: str) -> None:
    if name.startswith(OWN_VARIABLES):
        raise ValueError(f"{name} is set by elasticdl itself; leave it out")


@dataclass(frozen=True, slots=True)
class SecretEnv:
    """A variable from a key of a Secret that is there; without a key each of its keys is one."""

    secret: str
    name: str = ""
    key: str = ""


def parse_secret_envs(text: str) -> tuple[SecretEnv, ...]:
    return tuple(_parse_secret_env(part.strip()) for part in text.split(",") if part.strip())


def _parse_secret_env(text: str) -> SecretEnv:
    name, equals, source = text.rpartition("=")
    secret, slash, key = source.partition("/")
    if (bool(name), bool(key)) != (bool(equals), bool(slash)) or bool(name) != bool(key) or not secret:
        raise ValueError(f"{text!r} names no Secret: write SECRET for all of it, or NAME=SECRET/KEY for one variable")
    _require_users(name)
    return SecretEnv(secret, name, key)


@dataclass(frozen=True, slots=True)
class Priority:
    """A PriorityClass, and the share of the workers that get it; the others get none, the cluster's default."""

    class_name: str
    share: float = 1.0


def parse_priority(text: str) -> Priority | None:
    """None for no priority of its own."""
    if not text:
        return None
    name, equals, share = text.rpartition("=")
    if not equals:
        name, share = (HIGH, text) if re.match(r"[\d.+-]", text) else (text, "1")
    if not re.fullmatch(r"0?\.[0-9]+|[01](\.0*)?", share):
        raise ValueError(f"{share!r} is no share of the workers: write a number from 0 to 1, as in {HIGH}=0.5")
    return Priority(name, float(share))


@dataclass(frozen=True, slots=True)
class Queue:
    """Where another scheduler has the workers wait for their places."""

    scheduler: str  # kueue or volcano
    name: str


def parse_queue(text: str) -> Queue | None:
    """None for none."""
    if not text:
        return None
    scheduler, _, name = text.partition("=")
    if scheduler not in QUEUES or not name:
        raise ValueError(f"{text}: must be {' or '.join(f'{known}=QUEUE' for known in QUEUES)}")
    return Queue(scheduler, name)


def _pairs(text: str, example: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in re.split(r"(?<!\\),", text) if text.strip() else []:
        key, equals, value = (piece.strip() for piece in part.replace("\\,", ",").partition("="))
        if not (key and equals and value):
            raise ValueError(f"{part.strip()!r} is not KEY=VALUE; write it as in {example}")
        if key in found:
            raise ValueError(f"{key} is given twice; leave one out")
        found[key] = value
    return found
