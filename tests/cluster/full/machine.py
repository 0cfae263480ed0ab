"""Whether this machine can have a full cluster, and the programs of one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cluster.build import CLUSTER, NODE, require
from tests.cluster.full.leftovers import HIERARCHIES
from tests.cluster.steps import Unavailable, or_unavailable

_TOOLS = ("unshare", "nsenter", "ip", "mount")
_NEEDED = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "pids")
_WITHIN_S = 20.0


def find_full_programs(say: Callable[[str], None] = print) -> Path:
    """Those of the control plane and, in their cache, of the nodes; may take its time to build them.

    Raises:
        Unavailable: they cannot be built or used here.
        BuildError: they could not be built.
    """
    check_machine()
    require([CLUSTER, NODE], say)
    return CLUSTER.folder()


def check_machine() -> None:
    """
    Raises:
        Unavailable: this machine, or who we are on it, does not allow a node's namespaces and control groups.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("kubelets and containers need Linux and root")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)} not found: install util-linux, mount and iproute2")
    lacking = [name for name in _NEEDED if not os.access(HIERARCHIES / name / "tasks", os.W_OK)]
    if lacking:
        raise Unavailable(f"no writable control groups (version 1) for {', '.join(lacking)} in {HIERARCHIES}")
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/run"]
    with or_unavailable("namespaces cannot be made"):
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_S, check=False)
    if tried.returncode:
        raise Unavailable(f"namespaces cannot be made: {tried.stderr.strip()}")
