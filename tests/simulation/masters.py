"""A master: the real core in the real loop, with simulated sessions and launcher, and the store it saves to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from elasticdl.job.spec import WorkerRange
from elasticdl.master.core import events as e
from elasticdl.master.core.values import World
from elasticdl.master.core.worker_record import JobSnapshot, Snapshot
from elasticdl.master.shell.calls import Sessions, to_event
from elasticdl.master.shell.loop import SLOW_SAVE_SECONDS
from elasticdl.places.base import Launcher
from elasticdl.proto import elasticdl_pb2 as pb
from tests.simulation.adapter import HEARTBEAT_SECONDS, LoopDriver, MasterCore, SaveRequest, make_settings
from tests.simulation.lineage import Violation
from tests.simulation.network import Stream

if TYPE_CHECKING:
    from tests.simulation.site import Site

TICK_SECONDS = 0.1
FIND_SECONDS = 0.02
RETRY_SECONDS = 0.5
SAVE_SECONDS = 0.004
Mark = Callable[[], None]  # among the events: called when all before it is acted upon and saved


class Store:
    """Compare and swap, as a ConfigMap with its resourceVersion: a master that was replaced can't write."""

    def __init__(self) -> None:
        self.version = 0
        self.starts = 0  # of masters
        self.saved: list[JobSnapshot] = []
        self.down_until = 0.0

    def claim(self) -> int:
        """Make the caller the job's master; returns the version that it may write into."""
        self.starts += 1
        self.version += 1
        return self.version

    def save(self, snapshot: JobSnapshot, version: int) -> int:
        """Returns the new version, 0 if another has written since."""
        if version != self.version:
            return 0
        self.version += 1
        self.saved.append(snapshot)
        return self.version


class _DeadMasterError(Exception):
    """It is gone between two instructions."""


class _Streams(Sessions):
    """The sessions of one master."""

    def __init__(self, master: Master) -> None:
        super().__init__()
        self._master = master
        self.open_streams: dict[int, Stream] = {}

    def send(self, worker_ids: Iterable[int], message: pb.MasterMessage) -> None:
        self._master.burn()
        data = message.SerializeToString()
        for worker_id in worker_ids:
            if stream := self.open_streams.get(worker_id):
                stream.send_down(data)


class _Launcher:
    """How the loop reaches the cluster."""

    def __init__(self, master: Master) -> None:
        self._master = master

    async def launch(self, worker_id: int, away_from: Sequence[str] = ()) -> None:
        self._master.burn()
        self._master.site.checks.launched(self._master)
        self._master.site.cluster.launch(worker_id, away_from)

    def __getattr__(self, name: str) -> Any:
        """To end a worker, or to look at one."""
        self._master.burn()
        return getattr(self._master.site.cluster, name)


class Master:
    def __init__(self, site: Site, limits: WorkerRange, snapshot: JobSnapshot | None) -> None:
        self.site = site
        self.generation = site.store.starts + 1
        self.alive = True
        self.cut_off = False  # from the store and the launcher
        self.fuse: int | None = None  # instructions to its death
        self.streams = _Streams(self)
        settings = make_settings(limits, policy=site.plan.policy, folder=site.plan.handover)
        self._core = core = MasterCore(settings, snapshot, partial(site.trace.decision, self))
        launcher = cast(Launcher, _Launcher(self))
        self._loop = LoopDriver(core, self.streams, launcher, self._request_save, lambda: site.clock.now)
        self._version = site.store.claim()
        self._early: list[e.Event | Mark] | None = []  # until it is known what workers there are
        self._requests: list[SaveRequest] = []  # not yet being saved
        self._saving = False
        self._awaited: SaveRequest | None = None
        site.clock.after(FIND_SECONDS, self._find)

    # ---- to decide and to act ----

    def post(self, event: e.Event | Mark) -> None:
        if self._early is not None:
            self._early.append(event)
        elif self.alive:
            with self._mortal():
                self._loop.put(event) if callable(event) else self._loop.decide(event)
                self._act()

    @property
    def hears_launcher(self) -> bool:
        """Reports of what happened before it has asked are in the answer."""
        return self.alive and not self.cut_off and self._early is None

    def burn(self) -> None:
        """One more instruction is carried out."""
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise _DeadMasterError

    def _find(self) -> None:
        if not self.alive:
            return
        found, reports = self.site.cluster.find()
        early, self._early = self._early or [], None
        for event in (e.WorkersFound(found), *early, *reports):
            self.post(event)
        self._tick()

    def _tick(self) -> None:
        if self.alive:
            before = self._core.target
            self.post(e.Tick())
            if self._core.target != before:
                self.site.quiet_from = max(self.site.quiet_from, self.site.clock.now)
            self.site.clock.after(TICK_SECONDS, self._tick)

    @property
    def most(self) -> int:
        """Workers that it lets train."""
        limits = self.site.limits
        return max(limits.minimum, min(limits.maximum, self._core.target or limits.maximum))

    def _act(self) -> None:
        """What was decided, in order, up to what must be saved first."""
        while self.alive and self._awaited is None and (act := self._loop.next_act()) is not None:
            if isinstance(act, SaveRequest):
                if not act.done:
                    self._awaited = act
                    self.site.clock.after(SLOW_SAVE_SECONDS, self._lose_patience, act)
            elif isinstance(act, e.EndJob):
                self.site.end(act.phase, act.reason)
            elif callable(act):
                act()
            else:
                if isinstance(act, e.Tell) and isinstance(act.message, World):
                    self.site.checks.published(self, act.message)
                self._loop.act(act)

    # ---- to save ----

    def _request_save(self, request: SaveRequest) -> None:
        self._requests.append(request)
        if not self._saving:
            self._save()

    def _save(self) -> None:
        self._saving = True
        requests, self._requests = self._requests, []
        delay = SAVE_SECONDS * self.site.draw_master.uniform(0.5, 3.0)
        self.site.clock.after(delay, self._write, requests, requests[-1].make())

    def _write(self, requests: list[SaveRequest], snapshot: Snapshot) -> None:
        site = self.site
        if not self.alive and site.draw_master.random() < 0.5:
            return  # it died before the store had taken it
        if self.cut_off or site.clock.now < site.store.down_until:
            self._requests[:0] = requests
            site.clock.after(RETRY_SECONDS, self._save)
            return
        self._version = site.store.save(snapshot.job, self._version)
        if not self._version:
            self.die("another has taken over")
            return
        for request in requests:
            request.done = True
        self._saving = False
        if self._requests:
            self._save()
        if self._awaited is not None and self._awaited.done:
            self._awaited = None
            self.post(e.StateSaveStalled(""))

    def _lose_patience(self, request: SaveRequest) -> None:
        if not request.done:
            self.post(e.StateSaveStalled("simulated"))

    # ---- its sessions ----

    def hear(self, stream: Stream, data: bytes | None) -> None:
        if not self.alive:
            return
        if data is None:
            self.post(lambda: self._end_session(stream))
            return
        message, worker_id = pb.WorkerMessage.FromString(data), stream.process.worker_id
        body = message.WhichOneof("body")
        if not stream.greeted:
            if body != "hello":
                raise Violation("a session begins with Hello", f"it began with {body}")
            stream.greeted = True
            self._open_session(stream, message)
        elif body == "kv_put":
            with self._mortal():
                self.streams.put(worker_id, message.kv_put)
        else:
            self.post(to_event(worker_id, message))
            if self.site.plan.processes > 1 and body in ("failed", "finished"):
                taken = pb.MasterMessage(last_word_taken=pb.LastWordTaken())
                self.post(lambda: stream.send_down(taken.SerializeToString()))

    def lose(self, stream: Stream) -> None:
        worker_id = stream.process.worker_id
        if self.alive and self.streams.open_streams.get(worker_id) is stream:
            del self.streams.open_streams[worker_id]
            self.post(e.WorkerDisconnected(worker_id))

    def _open_session(self, stream: Stream, hello: pb.WorkerMessage) -> None:
        worker_id = stream.process.worker_id
        if older := self.streams.open_streams.get(worker_id):
            older.replaced = True
            older.send_down(None)
        self.streams.open_streams[worker_id] = stream
        welcome = pb.Welcome(job_name="job", heartbeat_interval=HEARTBEAT_SECONDS, generation=self.generation)
        stream.send_down(pb.MasterMessage(welcome=welcome).SerializeToString())
        with self._mortal():
            self.streams.replay(worker_id)
        self.post(to_event(worker_id, hello))

    @contextmanager
    def _mortal(self) -> Iterator[None]:
        try:
            yield
        except _DeadMasterError:
            self.die("killed")

    def _end_session(self, stream: Stream) -> None:
        """All that the worker has said is acted upon and saved."""
        stream.send_down(None)
        self.lose(stream)

    # ---- its end ----

    def die(self, reason: str) -> None:
        if not self.alive:
            return
        self.alive = False
        site = self.site
        site.trace.note(f"master {self.generation} ends: {reason}")
        for stream in self.streams.open_streams.values():
            stream.close()
        self.streams.open_streams.clear()
        site.master_ended()
