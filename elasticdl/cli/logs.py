"""``elasticdl logs``: what the master and the workers of a job wrote, each line under its writer's name."""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.cli.finding import add_job, find
from elasticdl.cli.parser import Parser
from elasticdl.cli.tail import looks


def command(argv: Sequence[str]) -> int:
    parser = Parser("logs", "Show the logs of a job's master and workers.")
    add_job(parser)
    parser.add_argument("--worker", type=int, metavar="N", help="only this worker's, as it wrote it")
    parser.add_argument("--follow", action="store_true", help="go on until the job has ended")
    given = parser.parse(argv)
    with find(given).logs(given.worker, follow=given.follow) as logs:
        for _ in looks(logs.may_grow):
            for line in logs.lines():
                print(line, flush=given.follow)
        for line in logs.last_words():
            print(line)
    return 0
