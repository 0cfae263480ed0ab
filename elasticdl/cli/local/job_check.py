"""The worker's own check of a job (`elasticdl.worker.check`) in a process of its own, beside which a master may start."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable

from elasticdl.cli.local.session_leader import ProcessGroup
from elasticdl.common.errors import JobFailedError, UserError
from elasticdl.common.startup import RUN_MODULE
from elasticdl.job.spec import JobSpec

CHECK_MODULE = "elasticdl.worker.check"
POLL = 0.02


class CheckBrokeError(JobFailedError):
    """Nothing is known of the job."""


def check(spec: JobSpec, impatient: Callable[[], bool] = lambda: False) -> None:
    """Returns once nothing was found, or somebody is impatient; what the user's module has started in the check has ended then.

    Raises:
        UserError: what the check found.
        CheckBrokeError: the check itself broke.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(spec.to_json().encode())
        given.seek(0)
        group = ProcessGroup(
            subprocess.Popen(
                [*RUN_MODULE, CHECK_MODULE], stdin=given, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
            )
        )
        try:
            # It imports a framework and the user's module, and opens the data, as a worker does at its start.
            deadline = time.monotonic() + spec.start_timeout
            while (code := group.code()) is None:
                if impatient():
                    return
                if time.monotonic() > deadline:
                    raise UserError(
                        "the check of the model and the data took longer than a worker's start may, "
                        f"{spec.start_timeout:g} s: --start_timeout gives it more"
                    )
                time.sleep(POLL)
        finally:
            group.end()
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
    if code == 2:
        raise UserError(lines[-1])
    if code != 0:
        tail = "\n".join(lines[-20:])
        raise CheckBrokeError(f"the check of the job broke (exit code {code}); it said:\n{tail}")
