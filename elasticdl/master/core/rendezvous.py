"""The rendezvous: when a new world is formed, of whom, and in which order.

Rules
1. A change begins at once when a member is lost, leaves, or says that its world broke; and, when standbys wait and there
   is room, after a window in which others may arrive.
2. Members are told: to leave together after their step (planned), or at once (broken). A loss during a planned change
   makes it a broken one.
3. When no member is left that has not asked, the next world is made of all who have asked and have a session. We wait for
   named workers, never for a number of them, so a death can't block it.
4. With fewer than the minimum nothing is published; those who asked keep their state and wait. Nor is anything
   published while one that leaves is ahead of all who have asked, since it may be about to say that it has finished; nor
   without the state while one that was cut off, and is not yet given up, may have it.
5. Those who hold state come first, the most advanced leading, of two at one step that of the later world; then by old
   rank, then by id.
6. Once a member has finished, newcomers are no longer let in; survivors of a late loss still are, however few.

Who is dead or stuck is judged elsewhere. This module reads the records and never changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from elasticdl.job.messages import Broken, Change, Member
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.values import DONE, IN_WORLD, WorkerState, World
from elasticdl.master.core.worker_record import JobSnapshot, Records, WorkerRecord

REASONS_SHOWN = 3
# Standbys wait at most so many windows for others, however steadily those arrive.
LONGEST_WAIT_IN_WINDOWS = 5
# A broken world is normally left well within this, seconds.
RECOVERY_FROM_BREAK = 1.0
NOBODY = -1
# That a worker may name: a version has 32 bits in what workers say.
MOST_VERSION = 2**31


@dataclass(slots=True)
class WorldChange:
    """The forming of a world."""

    since: float
    broken: bool
    reported_reason: str  # what a survivor noticed; shown if no cause is known
    causes: dict[int, str] = field(default_factory=dict)  # by worker; NOBODY for what no single one caused
    had_too_few: bool = False
    # Workers that have heard of it, and that their world is broken, if it is.
    told: set[int] = field(default_factory=set)
    is_untold: bool = True  # somebody may not have heard of it

    @property
    def reason(self) -> str:
        shown = list(self.causes.values())[:REASONS_SHOWN] or [self.reported_reason]
        more = len(self.causes) - len(shown)
        return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


class Rendezvous:
    def __init__(self, records: Records, join_window: float, past: JobSnapshot, scaled: str = "") -> None:
        """``scaled``: the job's name, for the command that changes its number of workers; empty if that can't be changed."""
        self._records = records
        self._scaled = scaled
        self._join_window = join_window
        self.version = past.world.version if past.world else 0  # of the newest world that anybody has heard of
        self.together = past.together  # one said that all members of its world have finished
        self.world: World | None = None
        self.change: WorldChange | None = None  # none is under way
        self.last_change: WorldChange | None = None  # by which this master has formed the present world
        self.shortage = ""  # why no world can be formed, if so
        self._window_end = 0.0  # standbys wait until then for others; each arrival may move it

    # ---- what is so ----

    def active_members(self) -> list[WorkerRecord]:
        """Those who train, or leave their world and have not asked for the next."""
        return self._records.of(WorkerState.MEMBER)

    def cut_off(self) -> list[WorkerRecord]:
        """Members of a broken world that have lost their session."""
        return self._records.of(WorkerState.MEMBER, connected=False) if self.broken else []

    def standbys(self) -> list[WorkerRecord]:
        """Those with a session, by how long they have waited."""
        return sorted(self._records.of(WorkerState.STANDBY, connected=True), key=attrgetter("queued_at"))

    def finished(self) -> list[WorkerRecord]:
        """Those of the present world, whether their processes are gone or not."""
        return [record for record in self._records.of(*DONE) if self._was_in(record)]

    @property
    def broken(self) -> bool:
        """The present world is broken, and the next is being formed."""
        return self.change is not None and self.change.broken

    @property
    def ending(self) -> bool:
        """A member has finished: no more newcomers."""
        return self.together or (self.world is not None and bool(self.finished()))

    @property
    def complete(self) -> bool:
        """Everybody who is left has finished; rank 0 among them, unless one said that all have, in whichever world."""
        if self._records.count(*IN_WORLD):
            return False
        leader = self.world.members[0].worker_id if self.world else None
        return self.together or any(record.worker_id == leader for record in self.finished())

    @property
    def reopened(self) -> bool:
        """Some have finished, but rank 0 was lost before it had: nobody wrote the result."""
        return self.ending and self.change is not None and not self._records.count(*IN_WORLD) and not self.complete

    def recovering_from_break(self, now: float) -> bool:
        """Members of a broken world are yet to ask for the next, which takes moments: nothing else is as urgent."""
        is_recent = self.change and self.change.broken and now - self.change.since < RECOVERY_FROM_BREAK
        return bool(is_recent and self._records.count(WorkerState.MEMBER))

    def alone(self, record: WorkerRecord) -> bool:
        """No member of a world holds the state who is to stay, as far as this master knows: it may not know the worker's own world."""
        others = (each for each in self._records.each_of(*IN_WORLD) if each is not record)
        return not any((each.has_state or each.step) and not each.waits_for_successor for each in others)

    def leaves_others(self, record: WorkerRecord) -> bool:
        """Others may still be in its world, and would wait for it."""
        others = (r for r in self._records.each_of(WorkerState.MEMBER, WorkerState.DRAINING) if r is not record)
        return self._was_in(record) and any(self._was_in(other) for other in others)

    def retention_order(self) -> list[int]:
        """Those to keep first when there are too many: by rank, but slow ones last, then the standbys by age."""
        inside = sorted(self._records.of(*IN_WORLD), key=lambda r: (r.slow is not None, r.rank))
        return [record.worker_id for record in (*inside, *self._records.of(WorkerState.STANDBY))]

    def _awaited_state(self, ready: Sequence[WorkerRecord]) -> str:
        """Whether a world of these would go on from an older state than there is: whom to wait for, and why; empty if not."""
        newest = max((record.advance for record in ready if record.has_state), default=None)
        leaving = [record for record in self._records.of(WorkerState.DRAINING) if record.world_version]
        if newest is None and leaving:
            return "waits for a worker that leaves: it may be writing the state"
        # Those who have asked, and whose session is lost; if they do not come back they are given up.
        absent = [
            r for r in self._records.of(WorkerState.STANDBY, WorkerState.REJOINING, connected=False) if r.has_state
        ]
        # Those who have asked an earlier master, and will ask this one.
        absent += [r for r in self._records.of(WorkerState.INITIALIZING) if r.ready]
        if newest is None and (self._records.of(WorkerState.EXCLUDED) or absent):
            return "waits for a worker that was cut off: it may have the state"
        if newest and any(record.connected and record.advance > newest for record in leaving):
            return "waits for a worker that leaves: it may have finished"
        return ""

    # ---- what follows ----

    def begin(self, now: float, reported_reason: str = "", *, broken: bool = False) -> WorldChange:
        """Begin a change, or join the one under way; a broken world makes a planned change a broken one."""
        if self.change is None:
            self.change, self._window_end = WorldChange(now, broken, reported_reason), 0.0
        if broken and not self.change.broken:
            self.change.broken = self.change.is_untold = True
            self.change.told.clear()
        return self.change

    def tell_again(self, record: WorkerRecord) -> None:
        """Its session is a new one: it may have missed what the others were told."""
        if self.change:
            self.change.told.discard(record.worker_id)
            self.change.is_untold = True

    def let_newcomers_in(self, now: float, limits: WorkerRange) -> None:
        """Begin a change if standbys wait, there is room, and others have had time to arrive."""
        if self.change:
            return
        waiting = self._records.count(WorkerState.STANDBY, connected=True)
        if not waiting and self.world is None:
            self.shortage = ""  # who was ready is gone
        if not waiting or self.ending:
            return
        members = self._records.count(WorkerState.MEMBER)
        if members and waiting < limits.maximum - members and now < self._window_end:
            return  # as is found below, too, but by a look at each member
        room = (
            limits.maximum
            - members
            + sum(record.waits_for_successor for record in self._records.each_of(WorkerState.MEMBER))
        )
        ready = members + waiting
        if room > 0 and ready < limits.minimum and not members:
            self.shortage = self._too_few(ready, limits)
        elif room > 0 and self._window_over(now, room):
            self.begin(now).causes[NOBODY] = self._describe(self.standbys())

    def notice(self) -> tuple[tuple[int, ...], Change | Broken] | None:
        """Who is to be told of the change under way, and what."""
        change, world = self.change, self.world
        if change is None or world is None or not change.is_untold:
            return None
        change.is_untold = False
        audience = (WorkerState.MEMBER, WorkerState.DRAINING) if change.broken else (WorkerState.MEMBER,)
        members = {record.worker_id for record in self._records.each_of(*audience) if self._was_in(record)}
        untold = members - change.told
        change.told |= untold
        message = (Broken if change.broken else Change)(world.version, change.reason)
        return (tuple(sorted(untold)), message) if untold else None

    def next_world(self, now: float, limits: WorkerRange) -> World | None:
        """If one can be formed now; else `shortage` says why not, unless members are waited for."""
        change = self.change
        if change is None or self._records.count(WorkerState.MEMBER):
            return None
        ending, standbys = self.ending, self.standbys()
        rejoining = self._records.of(WorkerState.REJOINING, connected=True)
        ready = rejoining if ending else [*rejoining, *standbys]
        if len(ready) < (1 if ending else limits.minimum):
            change.had_too_few = True
            self.shortage = self._too_few(len(ready), limits)
            return None
        if awaited := self._awaited_state(ready):
            self.shortage = awaited
            return None
        maximum = limits.maximum + len(self._records.lingering())
        if change.had_too_few and not self._window_over(now, maximum - len(rejoining)):
            return None
        chosen = sorted(ready, key=WorkerRecord.rank_order)[:maximum]
        members = tuple(Member(r.worker_id, r.host, r.step, r.has_state, r.epoch, r.synced_in) for r in chosen)
        return World(self.version + 1, members, change.reason)

    def heard_of(self, version: int) -> None:
        """A worker names a world. Whatever it says, the numbers after it must fit into the messages."""
        self.version = max(self.version, min(version, MOST_VERSION))

    def adopt(self, world: World) -> None:
        """This is the present world."""
        self.world, self.version = world, max(self.version, world.version)
        self.change, self.last_change, self.shortage = None, self.change, ""

    @property
    def why_changed(self) -> str:
        """As it is known by now: a worker that had lost its connection may turn out to have been killed."""
        if self.last_change:
            return self.last_change.reason
        return self.world.reason if self.world else ""

    def _was_in(self, record: WorkerRecord) -> bool:
        """Whether the last world it was in is the present one."""
        return self.world is not None and record.world_version == self.world.version

    def _window_over(self, now: float, room: int) -> bool:
        """Whether those who wait have waited long enough for others, or there is no room for others."""
        waiting = self._records.count(WorkerState.STANDBY, connected=True)
        if waiting >= room or not waiting:
            return True
        if now < self._window_end:
            return False
        queued = [record.queued_at for record in self._records.each_of(WorkerState.STANDBY, connected=True)]
        longest = LONGEST_WAIT_IN_WINDOWS * self._join_window
        self._window_end = min(max(queued) + self._join_window, min(queued) + longest)
        return now >= self._window_end

    def _describe(self, standbys: Sequence[WorkerRecord]) -> str:
        if self.world is None:
            return "the first workers are ready"
        ids = sorted(record.worker_id for record in standbys)
        shown = ", ".join(map(str, ids[:REASONS_SHOWN])) + (", ..." if len(ids) > REASONS_SHOWN else "")
        return f"worker {shown} joins" if len(ids) == 1 else f"workers {shown} join"

    def _too_few(self, ready: int, limits: WorkerRange) -> str:
        go_on = f"; `elasticdl scale {self._scaled} 1-{limits.maximum}` goes on with fewer"
        has_trained = bool(self._scaled and self.version and ready)
        return f"{ready} of at least {limits.minimum} workers ready{go_on * has_trained}"
