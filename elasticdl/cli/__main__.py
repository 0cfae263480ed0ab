"""The entry point of ``elasticdl``: runs a command, and turns errors into one line and an exit code.

| code | meaning |
| --- | --- |
| 0 | done; for a job: it succeeded |
| 1 | the job failed, was stopped by ``elasticdl stop`` or is lost; or its master does not answer |
| 2 | the user's mistake; nothing was started |
| 130 | interrupted by Ctrl-C (128 + the number of any other signal) |
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Sequence

import click
from click.shell_completion import shell_complete

from elasticdl.cli.parsing import Commands, version_text
from elasticdl.cli.signals import Interrupted, caught, interrupt
from elasticdl.common.errors import ElasticDLError, UserError

_START, _JOBS, _LOOK, _EXPORT, _ZOO = (
    f"elasticdl.cli.commands.{name}" for name in ("start", "jobs", "look", "export", "zoo_image")
)
TABLE = {
    "train": (_START, "train a model-zoo module on workers that may come and go"),
    "evaluate": (_START, "compute the metrics of a trained module, over all samples of a data set"),
    "predict": (_START, "write a trained module's predictions for all samples of a data set"),
    "run": (_START, "run your own training script on workers that may come and go"),
    "status": (_JOBS, "show one job, or all jobs"),
    "list": (_JOBS, "show all jobs"),
    "scale": (_JOBS, "change the number of workers of a running job"),
    "logs": (_JOBS, "show the logs of a job's master and workers"),
    "events": (_JOBS, "show what happened in a job: worlds, pauses, evaluations, checkpoints"),
    "report": (_LOOK, "write a job's history, and where its time went, as one HTML file"),
    "dashboard": (_LOOK, "the same live, in a browser on this machine, for all jobs"),
    "stop": (_JOBS, "stop a running job"),
    "delete": (_JOBS, "remove a job on a Kubernetes cluster, or one of this machine that is over"),
    "export": (_EXPORT, "make one file of a checkpoint that many processes have written"),
    "zoo": (_ZOO, "make the image of a model zoo: init, build, push"),
}
COMPLETE = "_ELASTICDL_COMPLETE"  # set by a shell, to what it asks (docs/cli.md)
FULL = (errno.ENOSPC, errno.EDQUOT)  # of a disk


def _show_version(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        click.echo(version_text())
        ctx.exit()


VERSION = click.Option(
    ["--version"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="show the versions of elasticdl, Python, collectives and frameworks",
)
COMMANDS = Commands("elasticdl", TABLE, params=[VERSION])


def dispatch(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code.

    Raises:
        ElasticDLError: whatever the command raises.
        UsageError: there is no such command or option, or one has not the values that it takes.
    """
    if asked := os.environ.get(COMPLETE):
        with contextlib.suppress(UserError, click.UsageError):  # of what makes no sense there is nothing to complete
            shell_complete(COMMANDS, {}, "elasticdl", COMPLETE, asked)
        return 0
    try:
        with COMMANDS.make_context("elasticdl", list(argv)) as ctx:
            code: int = COMMANDS.invoke(ctx)
            return code
    except click.exceptions.Exit as done:  # the help was shown
        return done.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    who = f"elasticdl {argv[0]}" if argv and argv[0] in TABLE else "elasticdl"
    open_closed_streams()
    try:
        with caught(interrupt):  # SIGTERM, too: a command may hold keys in a folder, which goes with it
            code = dispatch(argv)
            sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.UsageError as error:
        print(f"{who}: {error.format_message()} See `{who} --help`.", file=sys.stderr)
        return 2
    except ElasticDLError as error:
        print(f"{who}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except Interrupted as interrupted:
        return interrupted.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        print_no_more()  # the reader has gone, as in `elasticdl events | head`
        return 141
    except OSError as error:
        if error.errno not in FULL:
            if error.filename is None:
                raise
            print(f"{who}: {error.filename} can't be used: {error.strerror}", file=sys.stderr)
            return 1
        print_no_more()
        with contextlib.suppress(OSError):  # it may be there that nothing can be written
            print(f"{who}: {error.strerror}: neither what it prints nor its files can be written", file=sys.stderr)
        return 1
    return code


def open_closed_streams() -> None:
    """What the caller has closed, as with `>&-`, is nowhere. The next file or connection would take its number otherwise."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process lasts


def print_no_more() -> None:
    """What is still buffered must not raise at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
