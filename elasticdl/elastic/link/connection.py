"""A worker's line to its master: session and store, open before anything is known of the framework.

What comes between a worker's start and its first world (the framework, the user's module, the model) takes long and may
fail; the master hears of it through the session. A context takes the link over when there is a collective.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from elasticdl.common.credentials import CONNECTED, WorkerEnvironment, refuse_variables
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.link.store import Endpoint
from elasticdl.elastic.link.stream import MasterStream
from elasticdl.elastic.link.witness import DUMP_SHARE, DumpTimer
from elasticdl.job.spec import JobSpec


def prepare_horovod(environ: Mapping[str, str]) -> None:
    """Before anything of the user's is built on Horovod: what is built while it is off assumes a fixed world.

    Raises:
        UserError: the environment holds variables that an elastic Horovod can't bear.
    """
    refuse_variables(environ)
    os.environ["HOROVOD_ELASTIC"] = "1"


class MasterConnection:
    """The session of one worker, to `open` and `close`."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        core = WorkerCore(environment.worker_id)
        self._environment = environment
        timer = DumpTimer(os.environ, DUMP_SHARE * self.spec.heartbeat_timeout)
        self.session = Session(core, MasterStream(environment), timer)

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(self.session.store, self._environment.interface)

    @functools.cached_property
    def spec(self) -> JobSpec:
        return JobSpec.from_json(Path(self._environment.job_spec).read_text())

    def open(self) -> None:
        os.environ[CONNECTED] = self._environment.master
        self.session.open()

    def close(self) -> None:
        self.session.close()
