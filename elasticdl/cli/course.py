"""The course of a job on a screen: news from its journal, statuses, and in the end what it has to show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from elasticdl.cli.follow import Heard
from elasticdl.cli.outlets import tell
from elasticdl.cli.screens import Screen
from elasticdl.cli.wording import summary_lines
from elasticdl.job.events import KINDS, news
from elasticdl.job.facts import Facts
from elasticdl.job.journal import Entry, parse_entry
from elasticdl.proto import elasticdl_pb2 as pb


def show_course(
    following: Iterable[Heard | None],
    screen: Screen,
    goes_on: Callable[[Heard | None], bool] = lambda heard: True,
    hear: Callable[[Entry], None] = lambda entry: None,
) -> None:
    """Until the job is over. ``goes_on``: asked after each thing that came, and whenever nothing came; ``hear``: is told each entry."""
    for heard in following:
        if isinstance(heard, pb.JobStatus):
            screen.show(heard)
        elif heard and (entry := parse_entry(heard)) is not None:
            show_news(entry, screen)
            hear(entry)
        if not goes_on(heard):
            break


def show_news(entry: Entry, screen: Screen) -> None:
    text = None
    # Who follows a job of this machine keeps it alive: an entry that is damaged, or made up, must not end the training.
    with suppress(Exception):
        text = news(entry)
    if text is not None and KINDS[entry["event"]].passing:
        screen.passing(entry["event"], text)
    elif text is not None:
        screen.line(text)


def show_end(
    status: pb.JobStatus, journal: Iterable[str], output: str, has_shown: Callable[[str], bool] = lambda text: False
) -> None:
    """What a job that is over has to show; for a failed one the user's traceback, if that was the cause.

    ``has_shown``: whether a text stands on the screen already, as a worker has printed it.
    """
    if status.phase == "failed" and status.traceback and not has_shown(status.traceback.strip()):
        tell(status.traceback.rstrip())
    if status.phase in ("succeeded", "stopped"):
        tell("\n".join(summary_lines(status, Facts.of(journal).result(), output)))
