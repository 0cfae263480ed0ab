"""Merging a part of a manifest into another, a subset of Kubernetes' strategic merge; the user's templates are such parts.

| in the patch | what becomes of it |
| --- | --- |
| a mapping | merged key by key |
| null | takes the key away |
| containers, init containers, image pull secrets | merged element by element, by `name` |
| variables (`env`), volumes | an element takes the place of the one with its `name` |
| volume mounts, volume devices, ports, host aliases | by `mountPath`, `devicePath`, `containerPort`, `ip` |
| tolerations, topology spread constraints, finalizers, owner references | added to those there are |
| anything else, other lists too (commands, node selector terms) | takes the place of what was there |

Directives (`$patch`, `$retainKeys`) are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from elasticdl.common.credentials import Role
from elasticdl.common.errors import UserError
from elasticdl.common.reason import flat
from elasticdl.job.spec import JobSpec

Manifest = dict[str, Any]
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
}
# A variable has one value and a volume one source: what is said of it anew takes the place of all that was said before.
_WHOLE = ("env", "volumes")
_APPENDED = ("tolerations", "topologySpreadConstraints", "finalizers", "ownerReferences")
_PARTS = ("apiVersion", "kind", "metadata", "spec")  # of a pod
_ACCOUNT = ("serviceAccountName", "serviceAccount")


def merge(base: Mapping[str, Any], patch: Mapping[str, Any], where: str = "") -> Manifest:
    """``base`` with ``patch`` merged into it; neither is changed.

    Raises:
        ValueError: one line about what can't be merged, and where.
    """
    merged = dict(base)
    for key, value in patch.items():
        place = f"{where}.{key}" if where else key
        if str(key).startswith("$"):
            raise ValueError(f"{place}: directives are not understood; leave it out")
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge_value(key, base.get(key), value, place)
    return merged


def _merge_value(key: str, base: Any, value: Any, place: str) -> Any:
    if key in _KEYS or key in _APPENDED:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{place} must be a list, not {value!r}")
        there = base or []
        return _merge_by_key(there, value, _KEYS[key], place) if key in _KEYS else [*there, *value]
    if isinstance(base, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{place} must be a mapping, not {value!r}")
        return merge(base, value, place)
    if isinstance(value, Mapping):
        return merge({}, value, place)
    return value


def _merge_by_key(base: Sequence[Any], patch: Sequence[Any], key: str, place: str) -> list[Any]:
    merged = {element[key]: element for element in base}
    for index, element in enumerate(patch):
        where = f"{place}[{index}]"
        if not isinstance(element, Mapping) or key not in element:
            raise ValueError(f"{where} must be a mapping with {key}")
        whole = place.rpartition(".")[2] in _WHOLE
        merged[element[key]] = merge({} if whole else merged.get(element[key], {}), element, where)
    return list(merged.values())


def with_pod_templates(pod: Manifest, spec: JobSpec, role: Role) -> Manifest:
    """A role's pod with the user's templates merged into it, its own after the one for all pods.

    Raises:
        UserError: one can't be read, is not YAML, or is no part of such a pod.
    """
    own = f"{role}_pod_template"
    for option, path in (("pod_template", spec.pod_template), (own, getattr(spec, own))):
        source = f"--{option} {path}"
        template = _read(source, path) if path else {}
        if role is Role.MASTER and option == own and any(key in template.get("spec", {}) for key in _ACCOUNT):
            raise UserError(f"{source}: name the master's account with --service_account, and leave it out here")
        try:
            pod = merge(pod, template)
        except ValueError as error:
            raise UserError(f"{source}: {error}") from None
        if path and role is Role.MASTER and len(pod["spec"].get("containers", ())) > 1:
            beside = "a container beside the master's would keep the Job from ending: make it an init container with"
            raise UserError(f"{source}: {beside} restartPolicy: Always, or give it with --worker_pod_template")
    return pod


def _read(source: str, path: str) -> Manifest:
    """Metadata and spec, as far as the user gives them."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{source} is not YAML: {flat(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{source} must be a mapping with metadata and spec, as in a pod")
    for key in content:
        if key not in _PARTS:
            raise UserError(f"{source}: {key} is no part of a pod; put it below metadata or spec")
    for key in ("metadata", "spec"):
        if not isinstance(content.get(key, {}), dict):
            raise UserError(f"{source}: {key} must be a mapping")
    if content.get("spec", {}).get("restartPolicy", "Never") != "Never":
        raise UserError(f"{source}: spec.restartPolicy must be Never: the master itself replaces workers")
    if "name" in content.get("metadata", {}):
        raise UserError(f"{source}: metadata.name must be left out, as each pod has a name of its own")
    return {key: content[key] for key in ("metadata", "spec") if key in content}
