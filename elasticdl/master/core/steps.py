"""Which of the reported steps are news."""

from __future__ import annotations

from dataclasses import replace

from elasticdl.master.core import events as e


class StepFilter:
    """Lets each step of a world through once.

    A new rank 0 reports its last steps again, in case its predecessor did not come to it. Steps that are trained again,
    since the state was lost, are those of a later world and pass.
    """

    def __init__(self, newest: tuple[int, int] = (0, 0)) -> None:
        self.newest = newest  # world and step of the last one taken

    def news(self, event: e.ProgressReported) -> e.ProgressReported:
        """The event without the steps that are known."""
        fresh = tuple(step for step in event.steps if (step.world_version, step.step) > self.newest)
        if fresh:
            self.newest = (fresh[-1].world_version, fresh[-1].step)
        return replace(event, steps=fresh)
