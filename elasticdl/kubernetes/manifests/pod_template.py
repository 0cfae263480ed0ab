"""The user's pod templates: YAML files with parts of a pod."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from elasticdl.common.credentials import Role
from elasticdl.common.errors import UserError
from elasticdl.common.spec import JobSpec
from elasticdl.kubernetes.manifests.merge import merge
from elasticdl.kubernetes.manifests.pod import Manifest

_KEYS = ("apiVersion", "kind", "metadata", "spec")
_ACCOUNT = ("serviceAccountName", "serviceAccount")


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """``content``: metadata and spec, as far as the user gives them."""

    source: str  # the option and the file
    content: Mapping[str, Any]

    def merged_into(self, pod: Manifest) -> Manifest:
        """
        Raises:
            UserError: something of it can't be merged.
        """
        try:
            return merge(pod, self.content)
        except ValueError as error:
            raise UserError(f"{self.source}: {error}") from None


def read_pod_templates(spec: JobSpec, role: Role) -> list[PodTemplate]:
    """Those for the pods of a role, the later ones to be merged last.

    Raises:
        UserError: one can't be read, is not YAML, or is no part of such a pod.
    """
    own = f"{role}_pod_template"
    given = {"pod_template": spec.pod_template, own: getattr(spec, own)}
    templates = [_read(f"--{option} {path}", path) for option, path in given.items() if path]
    for template in templates if role is Role.MASTER else ():
        if template.source.startswith(f"--{own} ") and any(key in template.content.get("spec", {}) for key in _ACCOUNT):
            raise UserError(
                f"{template.source}: name the master's account with --service_account, and leave it out here"
            )
    return templates


def _read(source: str, path: str) -> PodTemplate:
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{source} must be a mapping with metadata and spec, as in a pod")
    for key in content:
        if key not in _KEYS:
            raise UserError(f"{source}: {key} is no part of a pod; put it below metadata or spec")
    for key in ("metadata", "spec"):
        if not isinstance(content.get(key, {}), dict):
            raise UserError(f"{source}: {key} must be a mapping")
    if content.get("spec", {}).get("restartPolicy", "Never") != "Never":
        raise UserError(f"{source}: spec.restartPolicy must be Never: the master itself replaces workers")
    if "name" in content.get("metadata", {}):
        raise UserError(f"{source}: metadata.name must be left out, as each pod has a name of its own")
    return PodTemplate(source, {key: content[key] for key in ("metadata", "spec") if key in content})
