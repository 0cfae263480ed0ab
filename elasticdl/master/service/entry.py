"""`python -m elasticdl.master.service.entry --job_dir DIR`: the master of one local job, from its specification to its end.

Exit codes: 0 succeeded, 1 failed, 2 the user's mistake (one line on stderr, nothing was started), 130 stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from elasticdl.common.errors import UserError
from elasticdl.common.jobdir import JobDir
from elasticdl.common.spec import JobSpec
from elasticdl.master.core.instructions import Phase
from elasticdl.master.launchers.tether import die_with_parent
from elasticdl.master.service.local_master import PARENT_GONE, local_launcher, serve_here

EXIT_CODES = {Phase.SUCCEEDED: 0, Phase.FAILED: 1, Phase.STOPPED: 130}
EXIT_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m elasticdl.master.service.entry", description=__doc__)
    parser.add_argument("--job_dir", required=True, type=Path, help="the job's directory, which holds job.json")
    parser.add_argument(
        "--die_with_parent", type=int, metavar="PID", help="stop the job when this process, the caller, ends"
    )
    args = parser.parse_args(argv)
    if args.die_with_parent:
        die_with_parent(PARENT_GONE)
        if os.getppid() != args.die_with_parent:  # it ended before it was heard of
            return EXIT_CODES[Phase.STOPPED]
    job_dir = JobDir(args.job_dir.absolute())
    try:
        spec = read_spec(job_dir)
        logging.basicConfig(
            level=spec.log_level, format=f"%(asctime)s {job_dir.name} %(levelname)s %(name)s: %(message)s"
        )
        end = asyncio.run(serve_here(spec, job_dir, local_launcher(spec, job_dir)))
    except UserError as error:
        print(f"elasticdl: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_CODES[end.phase]


def read_spec(job_dir: JobDir) -> JobSpec:
    """
    Raises:
        UserError: it is not there, or says what it must not.
    """
    try:
        return JobSpec.from_json(job_dir.spec.read_text())
    except OSError as error:
        raise UserError(f"can't read the job's specification {job_dir.spec}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{job_dir.spec}: {where}: {first['msg']}") from None


if __name__ == "__main__":
    sys.exit(main())
