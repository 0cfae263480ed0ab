"""Random streams: those of a batch and a rank where a worker does something with its part of the batch, and the script's elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from elasticdl.elastic.lightning.trainer_state import Streams, restore_streams, streams


class Window:
    """Open while a batch is loaded and moved to its device, and while the training step runs; paused for hooks in between."""

    def __init__(self) -> None:
        self._outside: Streams | None = None  # the script's, while the window is open
        self._within: Streams | None = None  # while it is paused
        self._before: Streams | None = None  # the script's, as the last window was closed

    def open(self, seed: Callable[[], None] | None) -> None:
        """``seed``: sets the streams of the batch; None: the script's are used throughout."""
        self._before = self._within = None
        if seed is not None:
            self._outside = streams()
            seed()

    def pause(self) -> None:
        if self._outside is not None:
            self._within = streams()
            restore_streams(self._outside)
            self._outside = None

    def resume(self) -> None:
        if self._within is not None:
            self._outside = streams()
            restore_streams(self._within)
            self._within = None

    def close(self) -> None:
        self._within = None
        if self._outside is not None:
            restore_streams(self._outside)
            self._before, self._outside = self._outside, None

    def put_back(self) -> None:
        """A training step was run again, and has drawn."""
        if self._before is not None:
            restore_streams(self._before)
