"""The first moments of a master that follows another: it listens, and decides nothing, until it knows what there is.

Workers go on training meanwhile. What they and the launcher say is held back; once everybody who may be in a world has
spoken, or the time for it is over, the world is taken up as its members have it, and what was held back is acted upon
in its order. So a world that is intact stays, and whoever died in between is seen to be missing.

The time is long, as the new master's address may take long to be known everywhere. It need not be waited out once
waiting holds up training: a member is back, so the address is known, and none of those that are back makes progress, so
their world is broken or hangs. Then those missing have as long as any worker that is cut off.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticdl.master.core import events as e
from elasticdl.master.core.instructions import World
from elasticdl.master.core.settings import Settings

_OF_A_SESSION = (
    e.WorkerConnected,
    e.WorkerDisconnected,
    e.JoinRequested,
    e.WorkerDraining,
    e.WorkerFinished,
    e.WorkerFailed,
)


class Recovery:
    def __init__(self, settings: Settings, remembered: World | None) -> None:
        self._timeout = settings.recovery_timeout
        self._silence = settings.heartbeat_timeout
        self._remembered = remembered
        self._since: float | None = None
        self._news = 0.0  # when somebody last came back, or was seen to train
        self._progress: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._doubtful: set[int] = set()
        self._claims: dict[int, World] = {}
        self._left = 0  # the newest world that somebody has left
        self.held: list[e.Event] = []
        self.connected: set[int] = set()

    @property
    def begun(self) -> bool:
        return self._since is not None

    def begin(self, expected: Iterable[int], doubtful: Iterable[int], now: float) -> None:
        """It is known who is there; ``expected`` may be in a world, and are waited for; ``doubtful`` may never come."""
        self._since = self._news = now
        self._awaited, self._doubtful = set(expected).difference(self.connected), set(doubtful)

    def forgive(self, absence: float) -> None:
        """The master itself was held up, and could hear nobody."""
        self._news += absence

    def heard(self, event: e.HeartbeatReceived, now: float) -> None:
        """A world that trains has lost nobody: its missing members are alive."""
        before, self._progress[event.worker_id] = self._progress.get(event.worker_id), event.progress
        if event.world_version and (not event.waiting or event.progress != before):
            self._news = now

    def hold(self, event: e.Event, now: float) -> None:
        match event:
            case e.WorkerConnected(worker_id):
                # It says again whatever of its earlier session is still true.
                self.held = [
                    old for old in self.held if not (isinstance(old, _OF_A_SESSION) and old.worker_id == worker_id)
                ]
                if worker_id in self._awaited:
                    self._awaited.discard(worker_id)
                    self._news = now
                self.connected.add(worker_id)
                self._claims.pop(worker_id, None)
                if event.members:
                    self._claims[worker_id] = World(event.world_version, event.members, "")
            case e.WorkerDisconnected(worker_id):
                self.connected.discard(worker_id)
            case e.JoinRequested():
                self._left = max(self._left, event.left_world)
            case e.WorkerExited(worker_id):
                self._awaited.discard(worker_id)
                self.connected.discard(worker_id)
                self._claims.pop(worker_id, None)
        self.held.append(event)

    def over(self, now: float) -> bool:
        if self._since is None:
            return False
        given_up = self._can_be_reached and now - self._news > self._silence
        return not self._awaited or given_up or self.waited(now) >= self._timeout

    def waited(self, now: float) -> float:
        return 0.0 if self._since is None else now - self._since

    @property
    def missing(self) -> list[int]:
        """Those who were expected and have not come."""
        return sorted(self._awaited)

    @property
    def _can_be_reached(self) -> bool:
        """Whether those missing would have come if they could. A standby's node may know the address before theirs do."""
        world = self.world
        members = world.worker_ids if world else self.connected if self._left else ()
        return self._awaited <= self._doubtful or not self.connected.isdisjoint(members)

    @property
    def world(self) -> World | None:
        """The newest world that anybody knows of.

        One that is only remembered may never have been announced; its members have asked for it, and will hear of it.
        """
        known = [*([self._remembered] if self._remembered else []), *self._claims.values()]
        newest = max(known, key=lambda world: world.version, default=None)
        return newest if newest and newest.version >= self._left else None
