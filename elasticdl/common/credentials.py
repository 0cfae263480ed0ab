"""Tokens and certificates, by which the two ends of a call to a master know each other.

A job on this machine has a token of the user's, sent over loopback only. A job on a cluster has a certification authority
of its own (`elasticdl.common.certificates`) and one certificate for each role; a process holds those of its own role as
the three files of a folder, as Kubernetes mounts a Secret of type ``kubernetes.io/tls``. What a role may do is decided
by the master (`elasticdl.master.shell.calls`).
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeAlias

import psutil

from elasticdl.common.errors import UserError

CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"


class Role(StrEnum):
    """What a process is to a job."""

    MASTER = "master"
    WORKER = "worker"
    OWNER = "owner"  # whoever submitted the job, and the command line for them
    METRICS = "metrics"  # what collects metrics; sees no more than those


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose a certificate is."""

    role: Role
    job: str

    @property
    def dns_name(self) -> str:
        """As the certificate has it. The master answers to its own, at whatever address it is reached."""
        return f"{self.role}.{self.job}.elasticdl"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The contents of one role's Secret: PEM."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    def to_mapping(self) -> dict[str, bytes]:
        return {CA: self.ca, CERTIFICATE: self.certificate, KEY: self.key}

    @classmethod
    def from_mapping(cls, files: Mapping[str, bytes]) -> Self:
        """Raises KeyError for what is not there."""
        return cls(ca=files[CA], certificate=files[CERTIFICATE], key=files[KEY])

    def write(self, folder: Path) -> None:
        """Write them readable by the user alone, whatever the umask; each replaces an older one atomically."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in self.to_mapping().items():
            scratch = folder / f".{name}.{os.getpid()}"
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            scratch.replace(folder / name)


@dataclass(frozen=True, slots=True)
class Token:
    """For loopback: whoever holds it may do everything."""

    value: str = field(repr=False)


class PathBelow:
    """A file in the folder that is the ``path`` of an object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _: type) -> Path:
        return Path(owner.path, self._name)


@dataclass(frozen=True, slots=True)
class TlsFolder:
    """Where a process finds the certificate of its role in a job."""

    path: Path

    ca = PathBelow(CA)
    certificate = PathBelow(CERTIFICATE)
    key = PathBelow(KEY)

    def read(self) -> TlsFiles:
        """
        Raises:
            UserError: a file is missing or can't be read.
        """
        try:
            return TlsFiles(self.ca.read_bytes(), self.certificate.read_bytes(), self.key.read_bytes())
        except OSError as error:
            raise UserError(
                f"can't read {error.filename}: {error.strerror}; {self.path} should hold {CA}, {CERTIFICATE} and {KEY}"
            ) from None


Credentials: TypeAlias = Token | TlsFolder


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A master as a client sees it."""

    address: str  # host:port
    credentials: Credentials
    title: str  # for messages: "the master at 127.0.0.1:50001 (process 7)"


# The environment variables by which a launcher connects a worker process with its master.
#
# A launcher writes them (`WorkerEnvironment.to_env`), the library reads them (`WorkerEnvironment.from_env`);
# without them the script runs alone. Also what a worker needs of its machine's network and of other variables.


LOOPBACK = "127.0.0.1"
MASTER = "ELASTICDL_MASTER"
TOKEN = "ELASTICDL_TOKEN"
TLS = "ELASTICDL_TLS"  # folder of the worker's certificate, instead of a token
WORKER_ID = "ELASTICDL_WORKER_ID"
JOB_SPEC = "ELASTICDL_JOB_SPEC"
HOST = "ELASTICDL_HOST"
# Of the pod that a master is in.
NAMESPACE = "ELASTICDL_NAMESPACE"
POD_UID = "ELASTICDL_POD_UID"
# Set for every worker of a job that puts several on one GPU: NCCL refuses that, so all of them reduce through the host.
SHARED_GPU = "ELASTICDL_SHARED_GPU"
# Seconds that a worker does without a master, one that is starting included, before it gives up.
MASTER_TIMEOUT = "ELASTICDL_MASTER_TIMEOUT"
# File that takes the stacks of a worker in which no Python code can run; without it they go to its stderr.
STACKS = "ELASTICDL_STACKS"
# Set by the process that holds the worker's session, to the master's address: its children are no workers.
CONNECTED = "ELASTICDL_CONNECTED"
# Of a worker of several processes (`elasticdl.places.worker_group`): the number of this process; and how many there are, with the file by which they
# find each other, with : between.
PROCESS = "ELASTICDL_PROCESS"
PROCESSES = "ELASTICDL_PROCESSES"
# For the agent of a place (`elasticdl.places.agent`), beside those of a worker: the place's id, the node that it is on, and
# the folder that takes the logs of its workers; without one they go to the agent's own stdout and stderr.
PLACE = "ELASTICDL_PLACE"
NODE = "ELASTICDL_NODE"
LOGS = "ELASTICDL_LOGS"

# On its second init Horovod 0.28.1 writes the default of one tuned parameter into the slot of the other
# (parameter_manager.cc, BayesianParameter::SetValue): ranks then fuse differently and abort.
REFUSED_VARIABLES = ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_AUTOTUNE")


SEVERAL = (
    "this worker has several processes (--processes_per_worker), which is for elastic.prepare(model, optimizer, loader) and TorchState of "
    "elasticdl.elastic.torch, and ElasticModelParallelStrategy of elasticdl.elastic.lightning: leave the option out, or train so"
)


@dataclass(frozen=True, slots=True)
class Processes:
    """Of one worker. ``number``: of this one. ``meeting``: the file by which they find each other."""

    number: int
    count: int
    meeting: str


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """Where the master is and who this worker is."""

    master: str  # host:port
    credentials: Credentials
    worker_id: int
    job_spec: str  # path of the job's specification, JSON
    host: str = LOOPBACK  # by which other workers reach this one
    interface: str = "lo"  # network interface for the collective; a worker finds it by the host
    master_timeout: float = 30.0  # training goes on without a master for this long
    processes: Processes | None = None  # of a worker that has several

    def to_env(self) -> dict[str, str]:
        return {
            MASTER: self.master,
            # The one that is not used is empty, so that none is inherited.
            TOKEN: self.credentials.value if isinstance(self.credentials, Token) else "",
            TLS: str(self.credentials.path) if isinstance(self.credentials, TlsFolder) else "",
            WORKER_ID: str(self.worker_id),
            JOB_SPEC: self.job_spec,
            HOST: self.host,
            MASTER_TIMEOUT: f"{self.master_timeout:g}",
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> WorkerEnvironment | None:
        """None when the process was not started by a launcher.

        Raises:
            UserError: some variables are there and others are not, or the host is no address of this machine.
        """
        if MASTER not in environ:
            return None
        host = environ.get(HOST, LOOPBACK)
        try:
            return cls(
                master=environ[MASTER],
                credentials=_credentials(environ),
                worker_id=int(environ[WORKER_ID]),
                job_spec=environ[JOB_SPEC],
                host=host,
                interface=interface_of(host),
                master_timeout=float(environ.get(MASTER_TIMEOUT, 30.0)),
                processes=_processes(environ),
            )
        except KeyError as missing:
            raise UserError(
                f"{MASTER} is set but {missing.args[0]} is not: start workers with `elasticdl run`, or unset both"
            ) from None


def _credentials(environ: Mapping[str, str]) -> Credentials:
    if folder := environ.get(TLS):
        return TlsFolder(Path(folder))
    if token := environ.get(TOKEN):
        return Token(token)
    raise KeyError(f"{TOKEN} (or {TLS})")


def _processes(environ: Mapping[str, str]) -> Processes | None:
    if PROCESS not in environ:
        return None
    count, _, meeting = environ[PROCESSES].partition(":")
    return Processes(int(environ[PROCESS]), int(count), meeting)


def interface_of(address: str) -> str:
    """The network interface that has this address; that of loopback has all of its network, whichever it names.

    Raises:
        UserError: there is none.
    """
    wanted = ipaddress.ip_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            own = ipaddress.ip_address(each.address.partition("%")[0])
            if own == wanted or (own.is_loopback and wanted.is_loopback):  # it takes all of 127.0.0.0/8
                return name
    raise UserError(f"no network interface of this machine has the address {address}")


def refuse_variables(environ: Mapping[str, str]) -> None:
    """
    Raises:
        UserError: a variable of Horovod is set that a job whose world changes can't bear.
    """
    for name in REFUSED_VARIABLES:
        if name in environ:
            raise UserError(
                f"{name} is set in the environment: Horovod 0.28.1 corrupts its parameters when it is started again "
                f"with it, as at every change of workers; unset {name}"
            )
