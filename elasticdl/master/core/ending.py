"""How the job ends: decided once. Its workers are told to leave, killed after a grace period, and given up after another."""

from __future__ import annotations

from enum import Enum

from elasticdl.master.core.values import Outcome


class Overdue(Enum):
    """What the end of a grace period calls for."""

    NOTHING = "nothing"
    KILL = "kill whoever is left"
    ABANDON = "end without those who can't even be killed"


class Ending:
    """``outcome`` if an earlier master has decided it."""

    def __init__(self, grace: float, outcome: Outcome | None) -> None:
        self._grace = grace
        self._deadline = 0.0
        self.outcome = outcome
        self.dismissed = False  # whether the workers have been told
        self.killed = False

    def decide(self, outcome: Outcome) -> None:
        """The first decision stands."""
        self.outcome = self.outcome or outcome

    def dismiss(self, now: float) -> None:
        self.dismissed, self._deadline = True, now + self._grace

    def kill(self, now: float) -> None:
        self.killed, self._deadline = True, now + self._grace

    def postpone(self, seconds: float) -> None:
        """The master could not hear or act for so long."""
        self._deadline += seconds

    def overdue(self, now: float) -> Overdue:
        if not self.dismissed or now < self._deadline:
            return Overdue.NOTHING
        return Overdue.ABANDON if self.killed else Overdue.KILL
