"""``elasticdl events``: the journal of a job, from its file, so that it is there after the job as well."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from elasticdl.cli.jobs import Life, find_job, life_of
from elasticdl.cli.parser import Parser
from elasticdl.cli.tail import Tail, looks
from elasticdl.cli.text import event_line


def command(argv: Sequence[str]) -> int:
    parser = Parser("events", "Show what happened in a job: workers, worlds, pauses, evaluations, checkpoints.")
    parser.add_argument("job", nargs="?", help="name of the job; may be left out if only one runs")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--follow", action="store_true", help="go on until the job has ended")
    given = parser.parse(argv)
    job = find_job(given.job)
    journal = Tail(job.journal)
    for _ in looks(lambda: given.follow and life_of(job, time.time()) in (Life.STARTING, Life.RUNNING)):
        for line in journal.lines():
            print(line if given.json else event_line(json.loads(line)), flush=given.follow)
    return 0
