"""Manifests as YAML that `kubectl` reads as what they are."""

from __future__ import annotations

import re
from collections.abc import Iterable

import yaml

from elasticdl.kube.manifests.merge import Manifest

# Words and numbers for readers of YAML 1.1 or 1.2, not all of which PyYAML takes for such: a job may be named y.
_AMBIGUOUS = re.compile(r"[-+.\d].*|y|n|yes|no|on|off|true|false|null|~", re.IGNORECASE | re.DOTALL)


class _Dumper(yaml.SafeDumper):
    """It writes the same mapping out twice, where others would refer to it."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = '"' if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def as_yaml(manifests: Iterable[Manifest]) -> str:
    text: str = yaml.dump_all(list(manifests), Dumper=_Dumper, sort_keys=False)
    return text
