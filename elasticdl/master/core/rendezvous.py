"""The rendezvous: who is in the world, when a new one is formed, and in which order.

Rules
1. A change begins at once when a member is lost, leaves, or says that the world broke under it; and, when standbys
   wait and there is room, after a window that lets later arrivals come along.
2. Survivors are told: to leave together after their step (planned), or at once (a member is gone). A loss during a
   planned change turns it into the second kind.
3. When no survivor is left that has not asked, the next world is made of all who have: members without a session at
   that moment stay out. Nobody is waited for by count, so a death can never wedge it.
4. With fewer than the minimum nothing is published; those who asked keep their state and wait.
5. Those who hold state come first, the most advanced leading, then by old rank, then by arrival.
6. Once a member has finished, newcomers are no longer let in; survivors of a late loss still are, however few.

Judging who is dead or stuck is not done here: `elasticdl.master.core.liveness` and the fleet say so through `remove`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from elasticdl.common.spec import WorkerRange
from elasticdl.master.core.events import JoinRequested, WorkerConnected
from elasticdl.master.core.instructions import (
    AnnounceChange,
    BreakWorld,
    Instruction,
    Member,
    PublishWorld,
    Record,
    World,
)
from elasticdl.master.core.peers import Peer, Standing, Told

REASONS_SHOWN = 3
# Standbys wait at most so many windows for others, however steadily those arrive.
LONGEST_WAIT_IN_WINDOWS = 5
# A broken world is normally left well within this.
HURRY = 1.0
_NOBODY = -1


@dataclass(slots=True)
class _Forming:
    since: float
    broken: bool
    hearsay: str  # what a survivor noticed; less telling than a cause
    causes: dict[int, str] = field(default_factory=dict)  # by worker; _NOBODY for what no single one caused
    starved: bool = False

    @property
    def reason(self) -> str:
        shown = list(self.causes.values())[:REASONS_SHOWN] or [self.hearsay]
        more = len(self.causes) - len(shown)
        return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


class Rendezvous:
    """Its methods take what happened; `advance` says what to do about it and must be called after each."""

    def __init__(self, join_window: float) -> None:
        self._join_window = join_window
        self._version = 0
        self._arrivals = 0
        self._forming: _Forming | None = None
        self._unready: set[int] = set()  # members that have not asked for the next world
        self._standbys: dict[int, float] = {}  # with a session, and when they asked; in that order
        self._overdue: set[int] = set()  # taken out of the world while cut off; they have still to ask
        self._finished: set[int] = set()  # of the present world
        self._together = False  # all its members had made their last step when one of those finished
        self._tell = False  # somebody may not have been told yet
        self.world: World | None = None
        self.peers: dict[int, Peer] = {}
        self.starved = ""  # why no world can be formed, if so

    # ---- what the job asks ----

    @property
    def version(self) -> int:
        """Of the newest world there is or was, 0 if there was none."""
        return self._version

    @property
    def members(self) -> frozenset[int]:
        """Those who train, or leave their world without having asked for the next."""
        return frozenset(self._unready)

    def hurried(self, now: float) -> bool:
        """Survivors of a broken world are being brought together, which takes moments: nothing else is as urgent."""
        return self.broken and bool(self._unready) and self._forming is not None and now - self._forming.since < HURRY

    @property
    def overdue(self) -> frozenset[int]:
        """Those who were in a world that went on without them, and have not asked for the next."""
        return frozenset(self._overdue)

    @property
    def broken(self) -> bool:
        """A world is being formed because the present one is broken."""
        return self._forming is not None and self._forming.broken

    @property
    def ending(self) -> bool:
        """A member has finished: no more newcomers."""
        return bool(self._finished)

    @property
    def complete(self) -> bool:
        """Everybody who is left has finished; rank 0 among them, unless one of them said that all have."""
        if self.world is None or not self._all_gone():
            return False
        return self.world.members[0].worker_id in self._finished or (self._together and self.ending)

    @property
    def lingering(self) -> frozenset[int]:
        """Those who train until their replacement can, whose place it takes."""
        return frozenset(peer.worker_id for peer in self.peers.values() if peer.lingers)

    def precedence(self) -> list[int]:
        """Those to keep first when there are too many: by rank, then the standbys by arrival."""
        inside = {Standing.MEMBER, Standing.LEFT}
        known = [p for p in self.peers.values() if p.standing in inside or p.standing is Standing.STANDBY]
        known.sort(key=lambda p: (p.standing not in inside, p.rank if p.standing in inside else p.arrival))
        return [peer.worker_id for peer in known]

    # ---- what happened ----

    def adopt(self, world: World, connected: Collection[int]) -> None:
        """Take up a world that another has formed: all its members stand in it, wherever they are."""
        self.world, self._version = world, max(self._version, world.version)
        for rank, member in enumerate(world.members):
            self._arrivals += 1
            peer = self.peers[member.worker_id] = Peer(member.worker_id, member.host, self._arrivals, Standing.MEMBER)
            peer.connected, peer.world_version, peer.rank = member.worker_id in connected, world.version, rank
            peer.step, peer.epoch, peer.has_state = member.step, member.epoch, True
            self._unready.add(member.worker_id)

    def connect(self, event: WorkerConnected, now: float) -> list[Instruction]:
        self._version = max(self._version, event.world_version)
        peer = self.peers.get(event.worker_id)
        if peer is None:
            self._arrivals += 1
            peer = self.peers[event.worker_id] = Peer(event.worker_id, event.host, self._arrivals)
        peer.connected, peer.host, peer.told = True, event.host, Told.NOTHING
        self._tell = True
        if peer.standing is Standing.STANDBY:
            self._standbys.setdefault(peer.worker_id, now)
        if peer.standing is Standing.MEMBER and self.world and event.world_version != self.world.version:
            return [PublishWorld(self.world, (peer.worker_id,))]
        if peer.standing is Standing.COMING and event.world_version > 0:
            self._overdue.add(peer.worker_id)
            return [BreakWorld((peer.worker_id,), event.world_version, "the others went on while it was cut off")]
        return []

    def disconnect(self, worker_id: int) -> None:
        peer = self.peers.get(worker_id)
        if peer is None:
            return
        peer.connected = False
        self._standbys.pop(worker_id, None)
        if peer.standing is Standing.MEMBER and self._forming and self._forming.broken:
            self._cut_off(peer, self._forming)

    def ask(self, event: JoinRequested, now: float) -> list[Instruction]:
        peer = self.peers.get(event.worker_id)
        current = self.world.version if self.world else 0
        if peer is None or peer.standing in (Standing.LEAVING, Standing.FINISHED):
            return []
        if peer.standing in (Standing.MEMBER, Standing.LEFT) and event.left_world != current:
            return []  # about an earlier world: late, or sent again
        self._version = max(self._version, event.left_world)
        peer.step, peer.epoch, peer.has_state = event.step, event.epoch, event.has_state
        if peer.standing is Standing.MEMBER:
            self._leave_world(peer, event, now)
        elif peer.standing is Standing.COMING:
            self._forget(peer.worker_id)
            peer.standing = Standing.STANDBY
            if peer.connected:
                self._standbys[peer.worker_id] = now
            return [Record("worker_ready", {"worker": peer.worker_id})]
        return []

    def drain(self, worker_id: int, reason: str, now: float, *, lingers: bool = False) -> None:
        """It leaves after its step; the others get a new world without it. ``lingers``: not before there are others."""
        peer = self.peers.get(worker_id)
        if peer is None or peer.standing in (Standing.LEAVING, Standing.FINISHED):
            return
        inside = (Standing.MEMBER, Standing.LEFT)
        others = any(p.standing in inside and p is not peer for p in self.peers.values())
        peer.lingers = lingers and peer.standing in inside and not others
        if peer.lingers:
            return
        was_member = peer.standing is Standing.MEMBER
        self._forget(worker_id)
        peer.standing = Standing.LEAVING
        if was_member:
            self._begin(now).causes[worker_id] = f"worker {worker_id} leaves: {reason}"

    def finish(self, worker_id: int, *, together: bool = False) -> None:
        """``together``: its whole world has."""
        peer = self.peers.get(worker_id)
        if peer is None or peer.standing not in (Standing.MEMBER, Standing.LEAVING) or not self._is_inside(peer):
            return
        self._together = self._together or together
        self._forget(worker_id)
        peer.standing = Standing.FINISHED
        self._finished.add(worker_id)

    def remove(self, worker_id: int, reason: str, now: float, *, clean: bool = False) -> None:
        """It is gone, or given up. ``clean``: it ended by itself, so a worker that was leaving has left nothing torn."""
        peer = self.peers.pop(worker_id, None)
        if peer is None:
            return
        self._forget(worker_id)
        torn = self._is_inside(peer) and peer.standing is Standing.LEAVING and self._unready and not clean
        if peer.standing is Standing.MEMBER or torn:
            self._begin(now, broken=True).causes[worker_id] = reason
        elif self._forming and worker_id in self._forming.causes and not clean:
            self._forming.causes[worker_id] = reason  # now it is known better

    def discard(self, worker_id: int) -> None:
        """It is gone, and nobody was waiting for it."""
        self.peers.pop(worker_id, None)
        self._forget(worker_id)

    def break_up(self, reason: str, now: float) -> None:
        """The members are alive but their collective hangs."""
        self._begin(now, broken=True).causes[_NOBODY] = reason

    # ---- what to do about it ----

    def advance(self, now: float, limits: WorkerRange) -> list[Instruction]:
        self._mend_torn_end(now)
        if self._forming is None and self._newcomers_due(now, limits):
            self._begin(now).causes[_NOBODY] = self._describe_newcomers()
        if self._forming is None:
            return []
        return [*self._tell_members(self._forming), *self._publish_if_ready(self._forming, now, limits)]

    def warn(self) -> list[Instruction]:
        """Only tell the members that their world is broken, without looking for a new one: the job is ending."""
        return self._tell_members(self._forming) if self._forming and self._forming.broken else []

    def _begin(self, now: float, hearsay: str = "", *, broken: bool = False) -> _Forming:
        """Begin a change, or join the one under way; a broken world makes a planned change a broken one."""
        forming = self._forming = self._forming or _Forming(now, broken, hearsay)
        forming.broken = forming.broken or broken
        self._tell = True
        if forming.broken:
            for worker_id in [i for i in self._unready if not self.peers[i].connected]:
                self._cut_off(self.peers[worker_id], forming)
        return forming

    def _leave_world(self, peer: Peer, event: JoinRequested, now: float) -> None:
        self._forget(peer.worker_id)
        peer.standing = Standing.LEFT
        if self._forming is None or (event.broken and not self.broken):
            hearsay = f"worker {peer.worker_id}: {event.reason or 'left the world'}"
            self._begin(now, hearsay, broken=event.broken)

    def _cut_off(self, peer: Peer, forming: _Forming) -> None:
        """The world is broken and this member has no session: it is taken for the cause, and may come back later."""
        self._forget(peer.worker_id)
        peer.standing = Standing.COMING
        self._overdue.add(peer.worker_id)
        forming.causes[peer.worker_id] = f"worker {peer.worker_id} lost its connection"

    def _forget(self, worker_id: int) -> None:
        self._unready.discard(worker_id)
        self._overdue.discard(worker_id)
        self._standbys.pop(worker_id, None)

    def _is_inside(self, peer: Peer) -> bool:
        return self.world is not None and peer.world_version == self.world.version

    def _all_gone(self) -> bool:
        return not self._unready and not any(p.standing is Standing.LEFT for p in self.peers.values())

    def _mend_torn_end(self, now: float) -> None:
        """Rank 0 was lost after others had finished, so nobody wrote the result: train on from the last checkpoint."""
        if self._finished and self._forming and self._all_gone() and not self.complete:
            self._finished.clear()

    def _newcomers_due(self, now: float, limits: WorkerRange) -> bool:
        room = limits.maximum - len(self._unready - self.lingering)
        if not self._standbys or self.ending or room <= 0:
            return False
        ready = len(self._unready) + len(self._standbys)
        if ready < limits.minimum and not self._unready:
            self.starved = _too_few(ready, limits)
            return False
        return self._window_over(now, room)

    def _window_over(self, now: float, room: int) -> bool:
        if len(self._standbys) >= room or not self._standbys:
            return True
        earliest, latest = next(iter(self._standbys.values())), next(reversed(self._standbys.values()))
        return now >= min(latest + self._join_window, earliest + LONGEST_WAIT_IN_WINDOWS * self._join_window)

    def _describe_newcomers(self) -> str:
        if self.world is None:
            return "the first workers are ready"
        ids = sorted(self._standbys)
        shown = ", ".join(map(str, ids[:REASONS_SHOWN])) + (", ..." if len(ids) > REASONS_SHOWN else "")
        return f"worker {shown} joins" if len(ids) == 1 else f"workers {shown} join"

    def _tell_members(self, forming: _Forming) -> list[Instruction]:
        if not self._tell or self.world is None:
            return []
        self._tell = False
        wanted = Told.BROKEN if forming.broken else Told.CHANGE
        audience = {Standing.MEMBER, Standing.LEAVING} if forming.broken else {Standing.MEMBER}
        untold = [p for p in self.peers.values() if p.standing in audience and self._is_inside(p) and p.told < wanted]
        if not untold:
            return []
        for peer in untold:
            peer.told = wanted
        ids, version = tuple(peer.worker_id for peer in untold), self.world.version
        if forming.broken:
            record = Record("world_broken", {"world": version, "reason": forming.reason})
            return [BreakWorld(ids, version, forming.reason), record]
        record = Record("change_announced", {"world": version, "reason": forming.reason})
        return [AnnounceChange(ids, version, forming.reason), record]

    def _publish_if_ready(self, forming: _Forming, now: float, limits: WorkerRange) -> list[Instruction]:
        if self._unready:
            return []
        eligible = {Standing.LEFT} if self.ending else {Standing.LEFT, Standing.STANDBY}
        ready = [p for p in self.peers.values() if p.standing in eligible and p.connected]
        minimum = 1 if self.ending else limits.minimum
        if len(ready) < minimum:
            forming.starved = True
            self.starved = _too_few(len(ready), limits)
            return []
        maximum = limits.maximum + len(self.lingering)
        if not any(p.has_state for p in ready) and any(p.was_member_and_leaves for p in self.peers.values()):
            self.starved = "waits for a worker that leaves: it may be writing the state"
            return []
        room = maximum - (len(ready) - len(self._standbys))
        if forming.starved and not self._window_over(now, room):
            return []
        return self._publish(sorted(ready, key=Peer.precedence)[:maximum], forming, now)

    def _publish(self, chosen: list[Peer], forming: _Forming, now: float) -> list[Instruction]:
        self._version += 1
        members = tuple(Member(p.worker_id, p.host, p.step, p.has_state, p.epoch) for p in chosen)
        self.world = World(self._version, members, forming.reason)
        for rank, peer in enumerate(chosen):
            peer.standing, peer.world_version, peer.rank, peer.told = (
                Standing.MEMBER,
                self._version,
                rank,
                Told.NOTHING,
            )
            self._standbys.pop(peer.worker_id, None)
        for peer in self.peers.values():
            if peer.standing is Standing.LEFT:
                peer.standing = Standing.STANDBY
                if peer.connected:
                    self._standbys[peer.worker_id] = now
        self._unready = {peer.worker_id for peer in chosen}
        self._finished.clear()
        self._together = False
        self._forming, self.starved = None, ""
        fields = {
            "world": self._version,
            "members": list(self.world.worker_ids),
            "step": max((m.step for m in members if m.has_state), default=0),
            "reason": forming.reason,
            "seconds": round(now - forming.since, 6),
        }
        return [PublishWorld(self.world, self.world.worker_ids), Record("world_formed", fields)]


def _too_few(ready: int, limits: WorkerRange) -> str:
    return f"{ready} of at least {limits.minimum} workers ready"
