"""The way from world to world: one driver for all front ends."""

from __future__ import annotations

import logging
import os
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Protocol

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.interruptions import Stopped, WorldBroken, WorldChanged
from elasticdl.elastic.core.world import World
from elasticdl.elastic.link.session import Session
from elasticdl.job.journal import WorldMark

log = logging.getLogger(__name__)


class Member(Protocol):
    """What a front end does on the way. Each may raise `WorldBroken`, and then the next world is tried."""

    def enter(self, world: World) -> None:
        """Connect to the other members."""

    def synchronize(self, world: World) -> bool:
        """Bring all members to rank 0's state. False: the script does so itself, in this world."""

    def leave(self) -> None:
        """Disconnect; nothing if that is done already."""

    def cast_end_vote(self) -> None:
        """Take part in a step with nothing to add: the training function has returned."""


class Worlds:
    """One worker's way through the worlds: does what the worker's core orders the training thread to do."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._core = session.core

    def tell(self, event: p.Event) -> None:
        """Something has happened to the training thread, which is the present one."""
        self._session.witness.thread = threading.get_ident()
        self._session.post(event)

    def begin(self) -> None:
        """Ask for the first world, or for that of another training."""
        self._core.position.leave()
        self.tell(p.Trigger.READY)

    def next(self, member: Member) -> World | None:
        """Be in the next world that is trained in. None: the training functions of all have returned.

        Raises:
            Stopped: this worker is to leave for good; the state is that of the last commit.
            JobFailedError: world after world broke without a step being made.
            UnreachableError: there has been no master for too long.
        """
        while True:
            match self._session.order():
                case p.Connect(world):
                    if self._core.under_master:
                        print_mark(self._core.worker_id, world)
                    self.attempt(lambda world=world: member.enter(world), p.Trigger.CONNECTED)  # type: ignore[misc]
                case p.Synchronize(world):
                    if not self.attempt(lambda world=world: member.synchronize(world), p.Trigger.SYNCED):  # type: ignore[misc]
                        return world
                case p.Train(world):
                    return world
                case p.LeaveWorld(_, broken):
                    self._core.position.undo() if broken else self._core.position.leave()
                    member.leave()
                    self.tell(p.Trigger.CLOSED)
                case p.Command.CAST_END_VOTE:
                    self.attempt(member.cast_end_vote, p.Trigger.ALL_RETURNED)
                case p.Command.COMPLETE:
                    return None
                case p.LeaveJob(reason, checkpoint, drained):
                    raise Stopped(reason, checkpoint=checkpoint, drained=drained)
                case p.Fail(error, message):
                    raise error(message)

    def attempt(self, work: Callable[[], object], done: p.Trigger) -> bool:
        """Tell that it is done, or why this world is left. False: it is done, and there is nothing to tell."""
        try:
            if work() is False:
                return False
            self.tell(done)
        except WorldChanged as change:
            self.tell(p.WorldLeft(str(change)))  # which the core knows, unless a hook has raised it
        except WorldBroken as failure:
            log.info("%s", failure)  # a lost worker is no matter, and the master tells of it
            self.tell(p.CollectiveFailed(str(failure)))
        return True


def print_mark(worker_id: int, world: World) -> None:
    """Into this process's output, after all that it has printed before."""
    when = datetime.now().isoformat(" ", "milliseconds")
    line = WorldMark(when, worker_id, world.rank, world.version).to_line()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have put anything there, or closed it
            stream.flush()
    out, err = _opened(1), _opened(2)
    # Where stderr leads to a file of its own. What goes through pipes comes to one log, which needs one mark.
    err_is_apart = err and stat.S_ISREG(err.st_mode) and not (out and os.path.samestat(out, err))
    for descriptor in (1, 2) if err_is_apart else (1,):
        with suppress(OSError):
            os.write(descriptor, line)


def _opened(descriptor: int) -> os.stat_result | None:
    try:
        return os.fstat(descriptor)
    except OSError:
        return None
