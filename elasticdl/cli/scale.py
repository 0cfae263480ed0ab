"""``elasticdl scale``: change the number of workers of a running job."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from elasticdl.cli.finding import add_job, find
from elasticdl.cli.parser import Parser
from elasticdl.common.errors import UserError
from elasticdl.common.spec import WorkerRange, Workers


def command(argv: Sequence[str]) -> int:
    parser = Parser("scale", "Change the number of workers of a running job.")
    add_job(parser)
    parser.add_argument("workers", metavar="N|MIN-MAX", help="workers to have from now on, as in 3 or 2-4")
    given = parser.parse(argv)
    workers = parse_workers(given.workers)
    with find(given).client() as client:
        print(client.scale(workers))
    return 0


def parse_workers(text: str) -> WorkerRange:
    try:
        workers: WorkerRange = TypeAdapter(Workers).validate_python(text)
    except ValidationError:
        raise UserError(
            f"{text!r} is not a number of workers: write N or MIN-MAX, as in 3 or 2-4, at least 1"
        ) from None
    return workers
