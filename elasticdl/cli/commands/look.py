"""A job to look at: ``report`` writes it as one HTML file, ``dashboard`` shows it live in a browser on this machine."""

from __future__ import annotations

import errno
import os
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from elasticdl.cli.commands.find_job import PLACE, all_jobs, find, job_argument, place_of
from elasticdl.cli.live_board import LiveBoard, LiveServer, history_of
from elasticdl.cli.parsing import Option, command
from elasticdl.cli.signals import SignalLog, caught
from elasticdl.common.errors import UserError
from elasticdl.job.facts import Facts
from elasticdl.job.jobdir import write_aside
from elasticdl.report.page import MARK, page_data
from elasticdl.report.page import report as as_page

SUFFIX = ".jsonl"
HEAD_BYTES = 500  # of a report, in which its mark stands


@command(
    job_argument(
        "name of the job, or path of a journal, with a / or ending in .jsonl; may be left out if only one runs"
    ),
    *PLACE,
    Option(["--out"], default="", metavar="FILE", help="the file to write (JOB.html in the current folder)"),
    help="Write a job's history as one HTML file: where the time went, workers, pauses, curves. It needs nothing else, "
    "no network either.",
)
def report(job: str | None, out: str, **given: Any) -> int:
    is_path = job is not None and (os.sep in job or job.endswith(SUFFIX))
    if is_path:
        path = Path(str(job))
        history, name = _read_file(path), path.stem
    else:
        handle = find(job, given)
        history, name = history_of(handle, time.time()), handle.name
    target = Path(out or f"{name}.html")
    _require_report(target)
    try:
        write_aside(target, as_page(page_data(history)))
    except OSError as error:
        raise UserError(f"--out {target} can't be written: {error.strerror}") from None
    print(target)
    return 0


def _read_file(path: Path) -> Facts:
    try:
        with path.open(errors="replace") as lines:
            found = Facts(path.stem).read(lines).conclude()
    except OSError as error:
        raise UserError(f"the journal {path} can't be read: {error.strerror}") from None
    if not found.counts:
        raise UserError(
            f"{path} has no entry of a journal: give journal.jsonl of a job, or what `elasticdl events --json` prints"
        )
    return found


def _require_report(target: Path) -> None:
    """What is in the place of the report is one, too.

    Raises:
        UserError: it is something else. A pipe would not be read to its end, and a device would be replaced.
    """
    if not os.path.exists(target):  # or writing will say what is wrong
        return
    if not target.is_file():
        raise UserError(f"--out {target} is no plain file; give one, as in --out job.html")
    try:
        with target.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        raise UserError(f"{target} is there and can't be read, so it may be no report: give another --out") from None
    if head and MARK.encode() not in head:
        raise UserError(f"{target} is there, and is no report of a job: remove it first, or give another --out")


@command(
    job_argument("name of the job whose page to print; all jobs are shown in any case"),
    *PLACE,
    Option(
        ["--port"], type=click.IntRange(0, 65535), default=0, metavar="PORT", help="port on 127.0.0.1 (0: a free one)"
    ),
    help="Show jobs live in a browser on this machine, until Ctrl-C. Only who knows the printed address can look.",
)
def dashboard(job: str | None, port: int, **given: Any) -> int:
    handle = find(job, given) if job is not None else None
    if handle is None and place_of(given):
        all_jobs(given)  # a place that there is not is told now
    signals = SignalLog()
    board = LiveBoard(partial(all_jobs, given))
    with caught(signals.add_or_raise), closing(_server(board, port)) as server:
        where = server.url(handle.namespace, handle.name) if handle else server.url()
        print(
            f"{where}\nuntil Ctrl-C; keep the address to yourself, as whoever has it on this machine can look",
            flush=True,
        )
        signals.wait()
    return 0


def _server(board: LiveBoard, port: int) -> LiveServer:
    try:
        return LiveServer(board, port)
    except OSError as error:
        why = "is taken" if error.errno == errno.EADDRINUSE else f"is not to be had: {error.strerror}"
        raise UserError(f"--port {port} {why}; give another, or leave it out for a free one") from None
