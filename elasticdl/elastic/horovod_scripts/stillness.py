"""Telling from outside whether a script moves on, however long it takes from one commit to the next.

A thread that hangs stands in one and the same call of one and the same Python function, and computes nothing. So does one
that waits for it in a collective: who of them is to blame is for the master to find out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticdl.elastic.link.own_stacks import current_frames

# Of one core, in the mean over the window. A process whose training hangs uses some, as Horovod's threads wait by looking
# again each millisecond: where that is expensive it comes to a third of a core, with peaks above a half.
BUSY = 0.5
WINDOW_SECONDS = 10.0


class Stillness:
    """Watches one thread, at first the one that makes this; call `moved` every second or so."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._thread = threading.get_ident()
        self._place = (0, 0)  # frame, instruction
        self._begun, self._cpu = clock(), cpu_clock()  # of the present window
        self._busy = False  # in the last one

    def watch_this_thread(self) -> None:
        self._thread = threading.get_ident()

    def moved(self) -> bool:
        """Whether the thread has left the call in which it was the last time, or anything was computed lately."""
        computed = self._computed()
        frame = current_frames().get(self._thread)
        if frame is None:
            return True  # it has ended: nothing is known of the one that may have taken over
        place = (id(frame), frame.f_lasti)
        # A loop that is always found in the same call has a new frame each time, perhaps where the old one was, and to
        # hold on to frames would be to hold on to all that is in them. So a frame is marked, by a field that only
        # debuggers look at.
        stays = place == self._place and not frame.f_trace_lines
        if place == self._place:
            frame.f_trace_lines = False
        self._place = place
        return computed or not stays

    def _computed(self) -> bool:
        now, cpu = self._clock(), self._cpu_clock()
        if now - self._begun >= WINDOW_SECONDS:
            self._busy = cpu - self._cpu > BUSY * (now - self._begun)
            self._begun, self._cpu = now, cpu
        return self._busy
