"""Who is silent and who is stuck, judged from heartbeats; what is done about it is the job's affair.

Silent: no sign of life for `heartbeat_timeout`, or no session for as long. One that has not yet asked for a world may
be importing or reading data, during which a Python process can't send heartbeats: the fleet says how long it may take.
Stuck: the counter of progress stands still for `progress_timeout`. A worker that is blocked inside a collective is not
to blame for that; if all of them are, their collective hangs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from elasticdl.master.core.events import HeartbeatReceived


@dataclass(slots=True)
class _Pulse:
    heard: float
    moved: float
    progress: int = -1
    waiting: bool = False
    cut_off: bool = False
    asked: bool = False


class Stall(Enum):
    STUCK = "stuck"  # these workers hold up the others
    HUNG = "hung"  # all wait for one another


@dataclass(frozen=True, slots=True)
class Finding:
    stall: Stall
    worker_ids: tuple[int, ...]


class Liveness:
    """Knows only workers that have had a session; one that is still starting is judged by nobody here."""

    def __init__(self, heartbeat_timeout: float, progress_timeout: float) -> None:
        self._heartbeat_timeout = heartbeat_timeout
        self._progress_timeout = progress_timeout
        self._pulses: dict[int, _Pulse] = {}
        self._looked: float | None = None

    def connected(self, worker_id: int, now: float) -> None:
        pulse = self._pulses.setdefault(worker_id, _Pulse(now, now))
        pulse.heard, pulse.cut_off = now, False

    def asked(self, worker_id: int, now: float) -> None:
        """It is warm: from now on it has to send its heartbeats."""
        if pulse := self._pulses.get(worker_id):
            pulse.heard, pulse.asked = now, True

    def disconnected(self, worker_id: int, now: float) -> None:
        if (pulse := self._pulses.get(worker_id)) and not pulse.cut_off:
            pulse.heard, pulse.cut_off = now, True

    def heard(self, event: HeartbeatReceived, now: float) -> None:
        pulse = self._pulses.get(event.worker_id)
        if pulse is None or pulse.cut_off:
            return
        if event.progress != pulse.progress:
            pulse.moved = now
        pulse.heard, pulse.progress, pulse.waiting = now, event.progress, event.waiting

    def restart(self, worker_ids: Collection[int], now: float) -> None:
        """Something new was asked of them: time without progress counts from now."""
        for worker_id in worker_ids:
            if pulse := self._pulses.get(worker_id):
                pulse.moved, pulse.waiting = now, False

    def forget(self, worker_id: int) -> None:
        self._pulses.pop(worker_id, None)

    def forgive_own_absence(self, now: float) -> float:
        """Call regularly. A master that was itself held up must not take its own silence for the workers'; for how long."""
        absence = now - self._looked if self._looked is not None else 0.0
        self._looked = now
        if absence <= self._heartbeat_timeout / 2:
            return 0.0
        for pulse in self._pulses.values():
            pulse.heard += absence
            pulse.moved += absence
        return absence

    def silent(self, now: float) -> dict[int, str]:
        """Who is to be given up, and why."""
        return {
            worker_id: f"{'no connection' if pulse.cut_off else 'no heartbeat'} for {self._heartbeat_timeout:g} s"
            for worker_id, pulse in self._pulses.items()
            if (pulse.asked or pulse.cut_off) and now - pulse.heard > self._heartbeat_timeout
        }

    def stalled(self, members: Collection[int], now: float, *, broken: bool) -> Finding | None:
        """Who among the members stands still, if any. In a broken world waiting is no excuse: it must be left."""
        still = [i for i in members if (p := self._pulses.get(i)) and now - p.moved > self._progress_timeout]
        if not still:
            return None
        stuck = tuple(sorted(i for i in still if broken or not self._pulses[i].waiting))
        if stuck:
            return Finding(Stall.STUCK, stuck)
        return Finding(Stall.HUNG, tuple(sorted(still))) if len(still) == len(members) else None
