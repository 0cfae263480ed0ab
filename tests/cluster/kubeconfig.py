"""The file by which a client finds a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import yaml


def write_kubeconfig(
    path: Path, cluster: Mapping[str, str], user: str, credentials: Mapping[str, str], namespace: str = "default"
) -> None:
    """A file with one context, readable by its owner alone."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": dict(cluster)}],
        "users": [{"name": user, "user": dict(credentials)}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": user, "namespace": namespace}}],
    }
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        yaml.safe_dump(content, file)
