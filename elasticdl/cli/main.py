"""The entry point of ``elasticdl``: picks the command's module, and turns errors into one line and an exit code.

| code | meaning |
| --- | --- |
| 0 | done; for a job: it succeeded |
| 1 | the job failed, or was stopped by ``elasticdl stop``; or its master does not answer |
| 2 | the user's mistake; nothing was started |
| 130 | interrupted by Ctrl-C (128 + the number of any other signal) |
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import elasticdl
from elasticdl.cli.former import command_instead
from elasticdl.cli.nearest import did_you_mean
from elasticdl.cli.signals import Interrupted
from elasticdl.common.errors import ElasticDLError, UserError

# Each is a module of this package with `command(argv) -> exit code`, imported only when it is asked for.
COMMANDS = {
    "train": "train a model-zoo module on workers that may come and go",
    "run": "run your own training script on workers that may come and go",
    "status": "show one job, or all jobs",
    "scale": "change the number of workers of a running job",
    "logs": "show the logs of a job's master and workers",
    "events": "show what happened in a job: worlds, pauses, evaluations, checkpoints",
    "stop": "stop a running job",
    "delete": "remove a job on a Kubernetes cluster, with everything that belongs to it",
    "zoo": "make the image of a model zoo: init, build, push",
}

USAGE = "usage: elasticdl COMMAND [OPTIONS]\n\n{commands}\n\n`elasticdl COMMAND --help` shows the options of a command."


def usage() -> str:
    return USAGE.format(commands="\n".join(f"  {name:8}{text}" for name, text in COMMANDS.items()))


def dispatch(argv: Sequence[str]) -> int:
    """Run one command.

    Raises:
        ElasticDLError: whatever the command raises; UserError for an unknown command.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"elasticdl {elasticdl.__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        raise UserError(f"unknown command {name}: {command_instead(name) or did_you_mean(name, COMMANDS)}")
    code: int = importlib.import_module(f"elasticdl.cli.{name}").command(rest)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = dispatch(argv)
        sys.stdout.flush()
    except ElasticDLError as error:
        who = f"elasticdl {argv[0]}" if argv and argv[0] in COMMANDS else "elasticdl"
        print(f"{who}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except Interrupted as interrupted:
        return interrupted.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone, as in `elasticdl events | head`; what is still buffered must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


if __name__ == "__main__":
    sys.exit(main())
