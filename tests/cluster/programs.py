"""Where the programs of the control plane are: given by the user, built before, or built now."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.build import CLUSTER, Unavailable, require
from tests.cluster.steps import or_unavailable

NAMES = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")
# The first 1.x whose flags are those of `tests.cluster.control_plane`, of programs that somebody else has built.
OLDEST = 26
_VERSION_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Programs:
    """A folder with the four programs of ``NAMES``."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)


def find_programs(say: Callable[[str], None] = print, run: str = "") -> Programs:
    """The programs in ``KUBEBUILDER_ASSETS`` if it is set, else the ones of ``build``, which may take its time, in ``run``.

    Raises:
        Unavailable: there are none and they cannot be built here.
        BuildError: they could not be built.
    """
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if not assets:
        require([CLUSTER], say, run)
        return Programs(CLUSTER.folder())
    folder = Path(assets)
    missing = [name for name in NAMES if not os.access(folder / name, os.X_OK)]
    if missing:
        raise Unavailable(f"KUBEBUILDER_ASSETS: {folder} lacks {', '.join(missing)}")
    command = [str(folder / "kube-apiserver"), "--version"]
    with or_unavailable(f"KUBEBUILDER_ASSETS: {folder}/kube-apiserver does not tell its version"):
        version = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_WITHIN_S, check=False).stdout
    found = re.search(r"v1\.(\d+)", version)
    if not found or int(found[1]) < OLDEST:
        raise Unavailable(
            f"KUBEBUILDER_ASSETS: {folder}/kube-apiserver says {version.strip()!r}, and 1.{OLDEST} or newer is needed"
        )
    return Programs(folder)
