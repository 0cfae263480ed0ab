"""The forms in which options say what a job wants of a cluster, as in ElasticDL.

    resources   cpu=4,memory=8Gi,gpu=1,vendor.com/device=2
    volumes     claim_name=data,mount_path=/data;host_path=/scratch,mount_path=/scratch,type=Directory
    envs        NAME=VALUE,NAME=VALUE          a comma within a value is written \\,
    secrets     SECRET,NAME=SECRET/KEY
    priority    CLASS  |  0.5  |  CLASS=0.5
    queue       kueue=QUEUE  |  volcano=QUEUE

Checked here is the form alone, and what a cluster would accept though it is a mistake. When the job is submitted, the cluster
itself is asked about names, sizes and paths, before anything is made. Every function raises `ValueError` with one line that
says what is wrong and what would be right.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

GPU = "nvidia.com/gpu"
_SHORT = {"gpu": GPU, "disk": "ephemeral-storage"}
_BINARY = {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)}
_DECIMAL = {
    suffix: Decimal(1000) ** power for power, suffix in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
}
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)(?:([eE][+-]?\d{1,2})|([KMGTPE]i|[numkMGTPE]?))", re.ASCII)
_VOLUME_KEYS = ("claim_name", "host_path", "mount_path", "sub_path", "type", "read_only")
OWN_VARIABLES = "ELASTICDL_"
OWN_FOLDER = "/etc/elasticdl"
ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io"
HIGH = "high"
KUEUE, VOLCANO = QUEUES = ("kueue", "volcano")


def parse_quantity(text: str) -> Decimal:
    """The value of a Kubernetes quantity, as in 0.5, 500m, 8Gi or 1e3."""
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is no quantity: write a number, with a suffix if you like, as in 0.5, 500m or 8Gi")
    number, exponent, suffix = match.groups()
    if exponent:
        return Decimal(number + exponent)
    return Decimal(number) * (_BINARY.get(suffix) or _DECIMAL[suffix])


def is_extended(resource: str) -> bool:
    """Whether a resource is a device: as much is requested as allowed."""
    return "/" in resource


def parse_resources(text: str) -> dict[str, str]:
    """Kubernetes' names of resources, with their quantities as written."""
    found: dict[str, str] = {}
    for key, quantity in _pairs(text, "cpu=4,memory=8Gi,gpu=1").items():
        name = _SHORT.get(key, key)
        if name in found:
            raise ValueError(f"{key} is given twice, as {name} is the same: leave one out")
        try:
            value = parse_quantity(quantity)
        except ValueError as error:
            raise ValueError(f"{key}={quantity}: {error}") from None
        if name == "memory" and value != value.to_integral_value():  # a cluster only warns of it
            meant = re.sub(r"[^\d.].*", "", quantity)
            raise ValueError(f"{key}={quantity} is less than a byte or a part of one: did you mean {meant}Mi?")
        found[name] = quantity
    return found


def requirements(request: str, limit: str) -> dict[str, dict[str, str]]:
    """The ``resources`` of a container. Devices are requested as limited: a cluster takes them in no other way."""
    requests, limits = parse_resources(request), parse_resources(limit)
    for name, quantity in {**limits, **requests}.items():
        if is_extended(name):
            requests.setdefault(name, quantity)
            limits.setdefault(name, quantity)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


@dataclass(frozen=True, slots=True)
class Volume:
    """Where files of a claim or of the node appear in every pod of the job."""

    mount_path: str
    claim_name: str = ""
    host_path: str = ""
    host_path_type: str = ""
    sub_path: str = ""
    read_only: bool = False


def parse_volumes(text: str) -> tuple[Volume, ...]:
    return tuple(_parse_volume(part.strip()) for part in text.split(";") if part.strip())


def _parse_volume(text: str) -> Volume:
    given = _pairs(text, "claim_name=data,mount_path=/data")
    for key in given:
        if key not in _VOLUME_KEYS:
            raise ValueError(f"{key} is no part of a volume: use {', '.join(_VOLUME_KEYS)}")
    read_only = given.get("read_only", "false")
    if read_only.lower() not in ("true", "false"):
        raise ValueError(f"read_only={read_only}: must be true or false")
    # The path in one spelling, so that a cluster finds two that are the same. A path with .. keeps it, and is refused.
    path = given.get("mount_path", "")
    plain = "/".join(part for part in path.split("/") if part not in ("", "."))
    volume = Volume(
        mount_path=f"/{plain}" if path.startswith("/") else plain,
        claim_name=given.get("claim_name", ""),
        host_path=given.get("host_path", ""),
        host_path_type=given.get("type", ""),
        sub_path=given.get("sub_path", ""),
        read_only=read_only.lower() == "true",
    )
    _check_volume(text, volume)
    return volume


def _check_volume(text: str, volume: Volume) -> None:
    """Mistakes that a cluster would accept, or could not be asked about."""
    mount, host = volume.mount_path, volume.host_path
    is_taken = f"{mount}/".startswith((f"{OWN_FOLDER}/", f"{ACCOUNT_FOLDER}/")) or mount == "/"
    either = "give either claim_name, of a PersistentVolumeClaim, or host_path, a folder of the node"
    findings = (
        (bool(volume.claim_name) == bool(host), f"{text}: {either}"),
        (not mount, f"{text}: mount_path is missing: say where in the pods the files are to appear"),
        (_is_no_place(mount), f"mount_path={mount}: must be an absolute path without .."),
        (host and _is_no_place(host), f"host_path={host}: must be an absolute path without .."),
        (is_taken, f"mount_path={mount}: is taken already; choose another"),
        (volume.host_path_type and not host, f"{text}: type belongs to host_path, not to claim_name; leave it out"),
    )
    for is_wrong, said in findings:
        if is_wrong:
            raise ValueError(said)


def _is_no_place(path: str) -> bool:
    return not path.startswith("/") or ".." in path.split("/")


def parse_envs(text: str) -> dict[str, str]:
    found = _pairs(text, "NAME=VALUE,OTHER=VALUE")
    for name in found:
        _check_variable(name)
    return found


def _check_variable(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z_.-][A-Za-z0-9_.-]*", name):  # a cluster's own rule, of which it would name no option
        raise ValueError(
            f"{name!r} can't be a variable's name: use letters, digits and _, with no digit at the beginning"
        )
    if name.startswith(OWN_VARIABLES):
        raise ValueError(f"{name} is set by elasticdl itself; leave it out")


@dataclass(frozen=True, slots=True)
class SecretEnv:
    """A variable from a key of a Secret that is there; without a key each of its keys is one."""

    secret: str
    name: str = ""
    key: str = ""


def parse_secret_envs(text: str) -> tuple[SecretEnv, ...]:
    found = tuple(_parse_secret_env(part.strip()) for part in text.split(",") if part.strip())
    for each in found:
        if sum((each.name or each.secret) == (other.name or other.secret) for other in found) > 1:
            raise ValueError(f"{each.name or each.secret} is given twice; leave one out")
    return found


def _parse_secret_env(text: str) -> SecretEnv:
    name, equals, source = text.rpartition("=")
    secret, slash, key = source.partition("/")
    if (bool(name), bool(key)) != (bool(equals), bool(slash)) or bool(name) != bool(key) or not secret:
        raise ValueError(f"{text!r} names no Secret: write SECRET for all of it, or NAME=SECRET/KEY for one variable")
    if name:
        _check_variable(name)
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


def class_name(text: str) -> str:
    """A PriorityClass for one pod, of which there can be no share."""
    priority = parse_priority(text)
    if priority and priority.share != 1:
        raise ValueError(f"{text}: there is one master only; name a PriorityClass")
    return priority.class_name if priority else ""


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
