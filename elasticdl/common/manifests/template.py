"""Reading the user's pod template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from elasticdl.common.errors import UserError

_KEYS = ("apiVersion", "kind", "metadata", "spec")
_OPTION = "--pod_template"


def read_pod_template(path: str) -> dict[str, Any]:
    """The ``metadata`` and ``spec`` that are to be merged into every pod; empty if there is no template.

    Raises:
        UserError: it can't be read, is not YAML, or is no part of a pod.
    """
    if not path:
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"{_OPTION} {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{_OPTION} {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{_OPTION} {path} must be a mapping with metadata and spec, as in a pod")
    for key in content:
        if key not in _KEYS:
            raise UserError(f"{_OPTION} {path}: {key} is no part of a pod; put it below metadata or spec")
    for key in ("metadata", "spec"):
        if not isinstance(content.get(key, {}), dict):
            raise UserError(f"{_OPTION} {path}: {key} must be a mapping")
    if content.get("spec", {}).get("restartPolicy", "Never") != "Never":
        raise UserError(f"{_OPTION} {path}: spec.restartPolicy must be Never: the master itself replaces workers")
    if "name" in content.get("metadata", {}):
        raise UserError(f"{_OPTION} {path}: metadata.name must be left out, as each pod has a name of its own")
    return {key: content[key] for key in ("metadata", "spec") if key in content}
