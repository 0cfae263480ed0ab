"""``elasticdl stop``: end a running job."""

from __future__ import annotations

import time
from collections.abc import Sequence

from elasticdl.cli.client import connect
from elasticdl.cli.jobs import find_job, is_alive, last_status, running_master
from elasticdl.cli.parser import Parser
from elasticdl.common.errors import UnreachableError
from elasticdl.common.jobdir import JobDir, MasterAddress
from elasticdl.common.spec import JobSpec

CLOSING_TIME = 10.0  # seconds beyond the workers' grace
POLL = 0.05


def command(argv: Sequence[str]) -> int:
    parser = Parser(
        "stop", "Stop a running job: it finishes its step and writes a checkpoint if it has a folder for it."
    )
    parser.add_argument("job", nargs="?", help="name of the job; may be left out if only one runs")
    parser.add_argument("--now", action="store_true", help="end the workers at once, without a checkpoint")
    parser.add_argument("--no_checkpoint", action="store_true", help="finish the step, but write no checkpoint")
    given = parser.parse(argv)
    job = find_job(given.job)
    address = running_master(job)
    grace = JobSpec.from_json(job.spec.read_text()).stop_grace
    with connect(address) as client:
        client.stop("elasticdl stop", checkpoint=not (given.no_checkpoint or given.now), now=given.now)
    wait_until_over(job, address, grace + CLOSING_TIME)
    status = last_status(job)
    print(f"job {job.name} {status.phase} at step {status.step}" if status else f"job {job.name} is gone")
    return 0


def wait_until_over(job: JobDir, address: MasterAddress, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while is_alive(address.pid) and not job.status.exists():
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"job {job.name} has not ended {timeout:.0f} s after it was told to; `elasticdl stop {job.name} --now` "
                f"ends it at once"
            )
        time.sleep(POLL)
