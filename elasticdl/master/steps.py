"""Which of the reported steps are news."""

from __future__ import annotations

from dataclasses import replace

from elasticdl.master import events as e


class StepFilter:
    """Lets each step of a world through once.

    A new rank 0 reports its last steps again, in case its predecessor did not come to it. Steps that are trained again,
    since the state was lost, are those of a later world and pass.
    """

    def __init__(self) -> None:
        self._newest = (0, 0)  # world, step

    def news(self, event: e.ProgressReported) -> e.ProgressReported:
        """The event without the steps that are known."""
        fresh = tuple(step for step in event.steps if (step.world_version, step.step) > self._newest)
        if fresh:
            self._newest = (fresh[-1].world_version, fresh[-1].step)
        return replace(event, steps=fresh)
