"""``elasticdl events``: the journal of a job, which is there after the job as well."""

from __future__ import annotations

import json
from collections.abc import Sequence

from elasticdl.cli.finding import add_job, find
from elasticdl.cli.parser import Parser
from elasticdl.cli.tail import looks
from elasticdl.cli.text import event_line


def command(argv: Sequence[str]) -> int:
    parser = Parser("events", "Show what happened in a job: workers, worlds, pauses, evaluations, checkpoints.")
    add_job(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--follow", action="store_true", help="go on until the job has ended")
    given = parser.parse(argv)
    with find(given).journal(follow=given.follow) as journal:
        for _ in looks(journal.may_grow):
            for line in journal.lines():
                print(line if given.json else event_line(json.loads(line)), flush=given.follow)
    return 0
