"""The environment variables by which a launcher connects a worker process with its master.

A launcher writes them (`WorkerEnvironment.to_env`), the library reads them (`WorkerEnvironment.from_env`);
their absence means that the script runs alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticdl.common.credentials import Credentials, TlsFolder, Token
from elasticdl.common.errors import UserError
from elasticdl.common.network import interface_of

LOOPBACK = "127.0.0.1"
MASTER = "ELASTICDL_MASTER"
TOKEN = "ELASTICDL_TOKEN"
TLS = "ELASTICDL_TLS"  # folder of the worker's certificate, instead of a token
WORKER_ID = "ELASTICDL_WORKER_ID"
JOB_SPEC = "ELASTICDL_JOB_SPEC"
HOST = "ELASTICDL_HOST"
INTERFACE = "ELASTICDL_INTERFACE"
# Of the pod that a master is in.
NAMESPACE = "ELASTICDL_NAMESPACE"
POD_UID = "ELASTICDL_POD_UID"
# Set for every worker of a job that puts several on one GPU: NCCL refuses that, so all of them reduce through the host.
SHARED_GPU = "ELASTICDL_SHARED_GPU"
# Seconds that a worker does without a master, one that is starting included, before it gives up.
MASTER_TIMEOUT = "ELASTICDL_MASTER_TIMEOUT"
# Set by the process that holds the worker's session, to the master's address: its children are no workers.
CONNECTED = "ELASTICDL_CONNECTED"


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """Where the master is and who this worker is."""

    master: str  # host:port
    credentials: Credentials
    worker_id: int
    job_spec: str  # path of the job's specification, JSON
    host: str = LOOPBACK  # by which other workers reach this one
    interface: str = "lo"  # network interface for the collective; found by the host where it is not known beforehand
    master_timeout: float = 30.0  # training goes on without a master for this long

    def to_env(self) -> dict[str, str]:
        return {
            MASTER: self.master,
            # The one that is not used is empty, so that none is inherited.
            TOKEN: self.credentials.value if isinstance(self.credentials, Token) else "",
            TLS: str(self.credentials.path) if isinstance(self.credentials, TlsFolder) else "",
            WORKER_ID: str(self.worker_id),
            JOB_SPEC: self.job_spec,
            HOST: self.host,
            INTERFACE: self.interface,
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
                interface=environ.get(INTERFACE) or interface_of(host),
                master_timeout=_seconds(environ, MASTER_TIMEOUT, 30.0),
            )
        except KeyError as missing:
            raise UserError(
                f"{MASTER} is set but {missing.args[0]} is not: start workers with `elasticdl run`, or unset both"
            ) from None
        except ValueError:
            raise UserError(f"{WORKER_ID} must be a whole number, not {environ[WORKER_ID]!r}") from None


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environ.get(name, default))
    except ValueError:
        raise UserError(f"{name} must be a number of seconds, not {environ[name]!r}") from None


def _credentials(environ: Mapping[str, str]) -> Credentials:
    token, folder = environ.get(TOKEN), environ.get(TLS)
    if token and folder:
        raise UserError(f"{TOKEN} and {TLS} are both set: unset the one that is not of this worker's master")
    if folder:
        return TlsFolder(Path(folder))
    if not token:
        raise KeyError(f"{TOKEN} (or {TLS})")
    return Token(token)
