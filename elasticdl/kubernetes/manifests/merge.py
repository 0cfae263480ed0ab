"""Merging a part of a manifest into another: a subset of Kubernetes' strategic merge.

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
from typing import Any

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


def merge(base: Mapping[str, Any], patch: Mapping[str, Any], where: str = "") -> dict[str, Any]:
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
        _check_list(value, place)
        there = base or []
        return _merge_by_key(there, value, _KEYS[key], place) if key in _KEYS else [*there, *value]
    if isinstance(base, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{place} must be a mapping, not {value!r}")
        return merge(base, value, place)
    if isinstance(value, Mapping):
        return merge({}, value, place)
    return value


def _check_list(value: Any, place: str) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{place} must be a list, not {value!r}")


def _merge_by_key(base: Sequence[Any], patch: Sequence[Any], key: str, place: str) -> list[Any]:
    merged = {element[key]: element for element in base}
    for index, element in enumerate(patch):
        where = f"{place}[{index}]"
        if not isinstance(element, Mapping) or key not in element:
            raise ValueError(f"{where} must be a mapping with {key}")
        whole = place.rpartition(".")[2] in _WHOLE
        merged[element[key]] = merge({} if whole else merged.get(element[key], {}), element, where)
    return list(merged.values())
