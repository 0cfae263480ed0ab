"""This process's part in the job, behind the functions of Horovod that a script calls.

``hvd.init()`` enters the next world and ``hvd.shutdown()`` leaves the present one; commits are the steps that the master
hears of, by which the most advanced survivor becomes rank 0, from whom Horovod's ``sync`` takes the state.

And whether the script stands still.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from traceback import walk_stack
from types import TracebackType
from typing import Any

from elasticdl.common.credentials import CONNECTED, MASTER, SEVERAL, WorkerEnvironment
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.elastic.collectives.horovod import HorovodWorld, is_failure, prepare_horovod
from elasticdl.elastic.collectives.port import world_broken
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import Progress
from elasticdl.elastic.core.protocol import Stopped, World
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.core.training_step import WorkerState
from elasticdl.elastic.link.session import MasterConnection, Session
from elasticdl.elastic.link.store import KvServer
from elasticdl.elastic.link.witness import current_frames
from elasticdl.elastic.training.job import Sigterm, Worlds
from elasticdl.elastic.training.runtime import failure_of
from elasticdl.job import messages as m

# Telling from outside whether a script moves on, however long it takes from one commit to the next.
#
# A thread that hangs is found at one and the same place, and its process computes nothing. So is one that waits for it in a
# collective: who of them is to blame is for the master to find out.

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
        self._place: list[tuple[int, int]] = []  # each frame of the thread, and its instruction
        self._begun, self._cpu = clock(), cpu_clock()  # of the present window
        self._busy = False  # in the last one

    def watch_this_thread(self) -> None:
        self._thread = threading.get_ident()

    def moved(self) -> bool:
        """Whether the thread is elsewhere than the last time, or anything was computed lately."""
        now, cpu = self._clock(), self._cpu_clock()
        if now - self._begun >= WINDOW_SECONDS:
            self._busy = cpu - self._cpu > BUSY * (now - self._begun)
            self._begun, self._cpu = now, cpu
        frame = current_frames().get(self._thread)
        if frame is None:
            return True  # it has ended: nothing is known of the one that may have taken over
        before, self._place = self._place, [(id(each), each.f_lasti) for each, _ in walk_stack(frame)]
        return self._busy or self._place != before


log = logging.getLogger(__name__)

EXIT_USER_ERROR = 2
# Far below any sensible progress_timeout.
TICK_SECONDS = 1.0


def is_failed_collective(error: BaseException | None) -> bool:
    """Whether this error, or one that it was raised from, says that a collective failed."""
    return error is not None and (is_failure(error) or is_failed_collective(error.__cause__))


class ScriptWorker:
    """A worker from the script's first ``hvd.init()`` on; until then nobody has connected."""

    def __init__(
        self,
        environ: MutableMapping[str, str],
        make_link: Callable[[WorkerEnvironment], MasterConnection] = MasterConnection,
    ) -> None:
        self._environ = environ
        self._make_link = make_link
        self._link: MasterConnection  # as the next two, from `claim` on
        self._session: Session
        self._worlds: Worlds
        self._server: KvServer | None = None  # where Horovod asks for the other members
        self._pid = 0  # of the process that has connected; a fork of it is no worker
        self._stillness = Stillness()
        self._ended = threading.Event()
        self._connection: HorovodWorld | None = None
        self._hvd: Any = None
        self._end_told = False  # the master knows how this worker ends, or will see it by itself

    # -- whose process this is --

    @property
    def world(self) -> World:
        """The present one, or the last."""
        return self._session.core.world

    @property
    def takes_part(self) -> bool:
        return self._pid == os.getpid()

    def claim(self) -> bool:
        """Connect, unless this process or a parent is connected already; returns `takes_part`."""
        if self._environ.get(MASTER) != self._environ.get(CONNECTED):
            self._connect()
        return self.takes_part

    def _connect(self) -> None:
        try:
            environment = WorkerEnvironment.from_env(self._environ)
            if environment is None:
                return  # the script has taken the variable away
            prepare_horovod(self._environ)
            link = self._make_link(environment)
            if environment.processes is not None:
                raise UserError(SEVERAL)
            if link.spec.collective == "torch":
                raise UserError("--collective torch: this script uses Horovod itself; leave it out")
        except UserError as error:
            print(f"elasticdl: {error}", file=sys.stderr)
            raise SystemExit(EXIT_USER_ERROR) from error
        link.session.break_collective = self._break_collective
        link.open()
        self._link, self._session, self._worlds = link, link.session, Worlds(link.session)
        self._pid = os.getpid()
        atexit.register(self._close)  # before Horovod's own, so that it runs after
        sys.excepthook = functools.partial(self._on_uncaught, sys.excepthook)
        threading.Thread(target=self._watch, name="elasticdl-progress", daemon=True).start()

    # -- worlds --

    def init(self, hvd: Any) -> None:
        """Enter the next world; a world that breaks while it forms is followed by another try.

        Raises:
            SystemExit: this worker is to leave for good, or there has been no master for too long.
            JobFailedError: world after world broke without a commit.
        """
        if hvd.is_initialized():
            hvd.init()  # as Horovod has it: nothing
            return
        if self._hvd is not None:
            raise RuntimeError(
                "Horovod is initialized for another framework; under elasticdl a process uses one of them"
            )
        self._stillness.watch_this_thread()
        self._hvd = hvd
        if self._session.core.state is not WorkerState.LEAVING:
            self._worlds.begin()
        try:
            world = self._worlds.next(self)
        except Stopped as stopped:
            self._end_told = True
            print(f"elasticdl: this worker leaves: {stopped.reason}", file=sys.stderr)
            raise SystemExit(0) from None
        except UnreachableError as error:
            print(f"elasticdl: {error}", file=sys.stderr)
            raise SystemExit(1) from error
        assert world is not None, "a script of Horovod's never waits for the others' ends"
        log.info("world %d: rank %d of %d (%s)", world.version, world.rank, world.size, world.reason)

    def enter(self, world: World) -> None:
        """As the next three, see `elasticdl.elastic.training.job.Member`."""
        assert self._hvd is not None, "a world is entered within hvd.init()"
        self._server = self._server or KvServer(self._session.store)
        self._connection = HorovodWorld(self._hvd, self._server, self._link.endpoint.interface)
        self._connection.start(world)
        if world.is_first and world.rank == 0:
            self._session.notify("collective", engine="horovod")

    def synchronize(self, world: World) -> bool:
        return False  # the script brings all to one state by itself

    def leave(self) -> None:
        if self._connection:
            self._connection.stop()
        self._connection = None

    def cast_end_vote(self) -> None:
        raise AssertionError("a script of Horovod's never waits for the others' ends")

    def holds(self, hvd: Any) -> bool:
        """Whether it is by this one that the present world was entered."""
        return self.takes_part and self._hvd is not None and self._hvd == hvd

    def shutdown(self) -> None:
        """Leave the present world."""
        if self._connection:
            self.leave()
            self._worlds.tell(p.WorldLeft("hvd.shutdown()"))
        self._hvd = None

    def failed(self, error: BaseException) -> None:
        """A collective failed: make it fail for everybody, now."""
        broken = world_broken(f"a collective of world {self.world.version} failed", error)
        self._worlds.tell(p.CollectiveFailed(str(broken)))

    @property
    def leaving(self) -> bool:
        """Whether the present world is to be left at the next commit."""
        return self._session.core.leaving

    # -- training --

    def synced(self) -> None:
        """The state is now that of rank 0."""
        core = self._session.core
        if core.state is WorkerState.SYNCING:
            core.synced(Progress(step=self.world.root.step))
            self._worlds.tell(p.Trigger.SYNCED)
            self._worlds.next(self)
        core.reporting.resume_clock(time.monotonic())

    def pass_by(self) -> None:
        """The script is between two steps."""
        if pause := self._session.core.pass_by(time.monotonic()):
            self._session.say(pause)

    def committed(self) -> None:
        """The script's state is saved, which counts as a step."""
        self._session.core.count_step(time.monotonic())

    def leave_together(self) -> None:
        """All members leave the present world after a commit."""
        self._worlds.tell(p.WorldLeft("committed"))

    # -- the end --

    def finish(self) -> None:
        """Training is complete; the script may have more to do."""
        self._end_told = True
        step = self._session.core.position.progress.step
        self._session.say(m.Finished(step, epochs=0, metrics={}, together=False))

    def _on_uncaught(
        self,
        next_hook: Callable[[type[BaseException], BaseException, TracebackType | None], None],
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """The script raised: tell the master, which ends the job with this traceback; unless the world is to blame."""
        if self.takes_part:
            self._end_told = True
        if self.takes_part and isinstance(error, Exception):
            self._session.say(failure_of(error, users=not is_failed_collective(error)))
        next_hook(kind, error, trace)

    def drained_by_sigterm(self) -> contextlib.AbstractContextManager[None]:
        """Within, a SIGTERM means: leave at the next commit. A handler of the script's own is called, too."""
        return Sigterm(self._session).listening()

    # -- details --

    def _close(self) -> None:
        if not self.takes_part:
            return
        # Python may take seconds from here to its end, which without a word would look like a worker that froze; and one
        # that ends in the middle of the training would be taken for one that was lost.
        if not self._end_told:
            self.finish()
        self._ended.set()
        self._link.close()
        if self._server is not None:
            self._server.close()

    def _break_collective(self, version: int) -> None:
        if connection := self._connection:
            connection.break_world(version)

    def _watch(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            self.tick()

    def tick(self) -> None:
        """Say whether the script moves; it may be an hour from one of its commits to the next.

        One that stands still may wait for the others in a collective, which can't be told from a hang of its own. So it
        never is to blame as long as any of them moves, unless its world is broken: that it must leave.
        """
        if not self._session.core.broken and self._stillness.moved():
            # If the script commits at this very moment, the times of one step are wrong: what is told are medians of many.
            self._session.core.reporting.advance(Activity.WAIT, time.monotonic())
