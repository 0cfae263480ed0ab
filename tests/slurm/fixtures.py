"""Slurm's controller and one node, from Debian's packages, as processes of this one; nothing is installed, root is needed.
A test module has it with `pytest_plugins = ["tests.slurm.fixtures"]`.

The node pretends to have as many processors as are asked for. Two partitions share it, and a job in ``high`` takes the place of jobs in
``low`` (``PreemptType=preempt/partition_prio``).
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.build import SLURM, require
from tests.cluster.control_plane import free_ports
from tests.cluster.processes import Leashed
from tests.cluster.recipes import Unavailable
from tests.waiting import wait_until

PROCESSORS = 4
KILL_WAIT = 5  # seconds between SIGTERM and SIGKILL
NODE_TIMEOUT = 10  # seconds until a node that does not answer is given up
_ANSWERED_WITHIN_S = 30.0
_LIBRARIES = "usr/lib/x86_64-linux-gnu"


@dataclass(frozen=True, slots=True)
class SlurmLab:
    """``environment``: what Slurm's programs need, as the user's shell would have it."""

    folder: Path
    environment: Mapping[str, str]
    node: Leashed

    def run(self, *words: str) -> str:
        """Run one of Slurm's programs; returns what it prints."""
        done = self.answer(*words)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def answer(self, *words: str) -> subprocess.CompletedProcess[str]:
        how = {"capture_output": True, "text": True, "timeout": _ANSWERED_WITHIN_S, "check": False}
        return subprocess.run(words, env=self.environment, **how)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """Of one node with `PROCESSORS` processors."""
    with ExitStack() as stack:
        try:
            lab = stack.enter_context(slurm_lab(tmp_path_factory.mktemp("slurm"), PROCESSORS))
        except Unavailable as error:
            pytest.skip(f"no Slurm: {error}")
        yield lab


@contextmanager
def slurm_lab(folder: Path, processors: int) -> Iterator[SlurmLab]:
    """A Slurm that runs meanwhile; no job of it is left.

    Raises:
        Unavailable, BuildError: its programs are not to be had.
        AssertionError: it does not come up.
    """
    if os.geteuid() != 0:
        raise Unavailable("Slurm's node starts jobs as their users, so it must be root's")
    require([SLURM])
    root = SLURM.folder() / "root"
    configuration = folder / "slurm.conf"
    configuration.write_text(_configuration(folder, root, processors))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    environment = {
        **os.environ,
        "SLURM_CONF": str(configuration),
        "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{root}/{_LIBRARIES}:{root}/{_LIBRARIES}/slurm-wlm",
    }
    common = ["-D", "-f", str(configuration)]
    stepd = ["-N", socket.gethostname(), "-d", f"{root}/usr/sbin/slurmstepd-wlm"]
    with ExitStack() as stack:
        controller = Leashed.start([f"{root}/usr/sbin/slurmctld-wlm", *common], folder / "slurmctld.out", environment)
        stack.callback(controller.stop)
        node = Leashed.start([f"{root}/usr/sbin/slurmd-wlm", *common, *stepd], folder / "slurmd.out", environment)
        stack.callback(node.stop)
        lab = SlurmLab(folder, environment, node)
        _wait_until_up(lab)
        try:
            yield lab
        finally:
            lab.answer("scancel", "--signal=KILL", "--full", "--me")


def _wait_until_up(lab: SlurmLab) -> None:
    def said() -> str:
        done = lab.answer("sinfo", "-h", "-o", "%T")
        return done.stdout + done.stderr

    wait_until(lambda: set(said().split()) == {"idle"}, lambda: f"{said()}; its logs: {lab.folder}", poll=0.2)


def _configuration(folder: Path, root: Path, processors: int) -> str:
    name = socket.gethostname()
    controller_port, node_port = free_ports(2)
    return f"""\
ClusterName=lab
SlurmctldHost={name}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
PluginDir={root}/{_LIBRARIES}/slurm-wlm
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={KILL_WAIT}
MpiDefault=none
ReturnToService=2
SlurmdTimeout={NODE_TIMEOUT}
NodeName={name} NodeAddr=127.0.0.1 CPUs={processors} Sockets=1 CoresPerSocket={processors} ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes={name} Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes={name} MaxTime=INFINITE State=UP PriorityTier=10
"""
