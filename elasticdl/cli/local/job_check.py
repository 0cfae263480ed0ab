"""The worker's own check of a job (`elasticdl.worker.check`) in a process of its own, beside which a master may start."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.common.process_group import ProcessGroup
from elasticdl.common.startup import RUN_MODULE
from elasticdl.job.spec import JobSpec

CHECK_MODULE = "elasticdl.worker.check"
POLL = 0.02


class CheckBrokeError(JobFailedError):
    """Nothing is known of the job."""


@dataclass(frozen=True, slots=True)
class JobCheck:
    group: ProcessGroup
    said: IO[bytes]
    timeout: float  # it imports a framework and the user's module, and opens the data, as a worker does at its start

    def wait(self, impatient: Callable[[], bool] = lambda: False) -> bool:
        """Whether it has come to its end, and found nothing; else somebody was impatient.

        Raises:
            UserError: what the check found.
            CheckBrokeError: the check itself broke.
        """
        deadline = time.monotonic() + self.timeout
        while (code := self.group.code()) is None:
            if impatient():
                return False
            if time.monotonic() > deadline:
                raise UserError(
                    f"the check of the model and the data took longer than a worker's start may, {self.timeout:g} s: "
                    "--start_timeout gives it more"
                )
            time.sleep(POLL)
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        if code == 2:
            raise UserError(lines[-1])
        if code != 0:
            tail = "\n".join(lines[-20:])
            raise CheckBrokeError(f"the check of the job broke (exit code {code}); it said:\n{tail}")
        return True


@contextlib.contextmanager
def checking(spec: JobSpec) -> Iterator[JobCheck]:
    """Leaving the context ends the check, and what the user's module has started in it."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(spec.to_json().encode())
        given.seek(0)
        process = subprocess.Popen(
            [*RUN_MODULE, CHECK_MODULE], stdin=given, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
        )
        group = ProcessGroup(process.pid, process.wait)
        try:
            yield JobCheck(group, said, spec.start_timeout)
        finally:
            group.end()
