"""The environment variables by which a launcher connects a worker process with its master.

A launcher writes them (`WorkerEnvironment.to_env`), the library reads them (`WorkerEnvironment.from_env`);
their absence means that the script runs alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticdl.common.errors import UserError
from elasticdl.common.network import interface_of

LOOPBACK = "127.0.0.1"
MASTER = "ELASTICDL_MASTER"
TOKEN = "ELASTICDL_TOKEN"
TLS = "ELASTICDL_TLS"  # folder of the certificates, instead of a token
WORKER_ID = "ELASTICDL_WORKER_ID"
JOB_SPEC = "ELASTICDL_JOB_SPEC"
HOST = "ELASTICDL_HOST"
INTERFACE = "ELASTICDL_INTERFACE"
# Set for every worker of a job that puts several on one GPU: NCCL refuses that, so all of them reduce through the host.
SHARED_GPU = "ELASTICDL_SHARED_GPU"
# Set by the process that holds the worker's session, to the master's address: its children are no workers.
CONNECTED = "ELASTICDL_CONNECTED"

TOKEN_KEY = "elasticdl-token"  # under which every gRPC call to the master carries the token


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """Where the master is and who this worker is."""

    master: str  # host:port
    token: str
    worker_id: int
    job_spec: str  # path of the job's specification, JSON
    host: str = LOOPBACK  # by which other workers reach this one
    interface: str = "lo"  # network interface for the collective; found by the host where it is not known beforehand

    def to_env(self) -> dict[str, str]:
        return {
            MASTER: self.master,
            TOKEN: self.token,
            WORKER_ID: str(self.worker_id),
            JOB_SPEC: self.job_spec,
            HOST: self.host,
            INTERFACE: self.interface,
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
                token=environ[TOKEN],
                worker_id=int(environ[WORKER_ID]),
                job_spec=environ[JOB_SPEC],
                host=host,
                interface=environ.get(INTERFACE) or interface_of(host),
            )
        except KeyError as missing:
            raise UserError(
                f"{MASTER} is set but {missing.args[0]} is not: start workers with `elasticdl run`, or unset both"
            ) from None
        except ValueError:
            raise UserError(f"{WORKER_ID} must be a whole number, not {environ[WORKER_ID]!r}") from None
