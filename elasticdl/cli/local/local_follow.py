"""Following a job that this command has started: status and news go to the screen, signals become requests to stop.

The news come from the journal's file, where they still are when the master is gone.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from elasticdl.cli.line_streams import LineStream
from elasticdl.cli.local.master_process import CLOSING_TIME, MasterProcess
from elasticdl.cli.master_client import MasterClient, connect
from elasticdl.cli.screens import Screen
from elasticdl.cli.status_watch import StatusWatch, WatchEnded, show_news
from elasticdl.common.jobdir import MasterAddress

POLL = 0.1
KILL_SECONDS = 3.0  # that a master gets to stop at once


class Interruptions:
    """What the signals so far mean: the first asks for a clean stop, the second for one at once, the third kills."""

    def __init__(self, client: MasterClient, screen: Screen, stop_grace: float) -> None:
        self._client = client
        self._screen = screen
        self._stop_grace = stop_grace
        self._count = 0
        self._deadline = float("inf")

    def add(self, now: float) -> None:
        self._count += 1
        if self._count == 1:
            self._client.stop_soon("interrupted", checkpoint=True)
            self._deadline = now + self._stop_grace + CLOSING_TIME
            self._screen.line("stopping after this step; press Ctrl-C again to stop at once")
        elif self._count == 2:
            self._client.stop_soon("interrupted twice", checkpoint=False, now=True)
            self._deadline = now + KILL_SECONDS
            self._screen.line("stopping at once")
        else:
            self._deadline = now

    def are_over(self, now: float) -> bool:
        """The master has had the time that they allow."""
        return now >= self._deadline


@dataclass(frozen=True, slots=True)
class Following:
    """Shows a job until it has ended, its master is gone, or the user's patience is (then the master is killed)."""

    master: MasterProcess
    journal: LineStream
    screen: Screen
    interrupted: Callable[[], bool]
    stop_grace: float

    def run(self, address: MasterAddress | None) -> None:
        """``address`` is None for a job that ended sooner than it could be reached: its news are shown all the same."""
        if address is not None:
            with connect(address) as client, StatusWatch(client) as watch:
                self._show_all(watch, Interruptions(client, self.screen, self.stop_grace))
        self.master.wait(CLOSING_TIME)
        show_news(self.journal, self.screen)

    def _show_all(self, watch: StatusWatch, interruptions: Interruptions) -> None:
        while not self.master.has_ended() or not watch.inbox.empty():
            show_news(self.journal, self.screen)
            if self.interrupted():
                interruptions.add(time.monotonic())
            if interruptions.are_over(time.monotonic()):
                self.master.kill()
                return
            try:
                status = watch.inbox.get(timeout=POLL)
            except queue.Empty:
                continue
            if isinstance(status, WatchEnded):
                return
            self.screen.show(status)
