"""Where the programs of the control plane are: given by the user, built before, or built now."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.build import CONTROL_PLANE, Unavailable, require

NAMES = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")


@dataclass(frozen=True, slots=True)
class Programs:
    """A folder with the four programs of ``NAMES``, and the minor version of its Kubernetes 1.x."""

    folder: Path
    minor: int

    def path(self, name: str) -> str:
        return str(self.folder / name)


def find_programs(say: Callable[[str], None] = print) -> Programs:
    """The programs in ``KUBEBUILDER_ASSETS`` if it is set, else the ones of ``build``, which may take its time.

    Raises:
        Unavailable: there are none and they cannot be built here.
        BuildError: they could not be built.
    """
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if not assets:
        require([CONTROL_PLANE], say)
    folder = Path(assets) if assets else CONTROL_PLANE.folder()
    missing = [name for name in NAMES if not os.access(folder / name, os.X_OK)]
    if missing:
        raise Unavailable(f"{folder} lacks {', '.join(missing)}" + (" (KUBEBUILDER_ASSETS)" if assets else ""))
    version = subprocess.run(
        [folder / "kube-apiserver", "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    found = re.search(r"v1\.(\d+)", version)
    if not found:
        raise Unavailable(f"{folder / 'kube-apiserver'} says {version.strip()!r}, not a version of Kubernetes 1")
    return Programs(folder, int(found[1]))
