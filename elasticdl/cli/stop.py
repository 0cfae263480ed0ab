"""``elasticdl stop``: end a running job."""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.cli.finding import add_job, find
from elasticdl.cli.parser import Parser

CLOSING_TIME = 10.0  # seconds beyond the workers' grace


def command(argv: Sequence[str]) -> int:
    parser = Parser(
        "stop", "Stop a running job: it finishes its step and writes a checkpoint if it has a folder for it."
    )
    add_job(parser)
    parser.add_argument("--now", action="store_true", help="end the workers at once, without a checkpoint")
    parser.add_argument("--no_checkpoint", action="store_true", help="finish the step, but write no checkpoint")
    given = parser.parse(argv)
    job = find(given)
    with job.client() as client:
        client.stop("elasticdl stop", checkpoint=not (given.no_checkpoint or given.now), now=given.now)
    status = job.wait_until_over(job.spec().stop_grace + CLOSING_TIME)
    print(f"job {job.name} {status.phase} at step {status.step}" if status else f"job {job.name} is gone")
    return 0
