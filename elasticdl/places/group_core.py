"""What is decided for a worker of several processes: what they say as one, when their sessions begin and end, and when the worker ends.

Pure: events in, actions out. `elasticdl.places.worker_group` carries the actions out; the simulator does so, too.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from elasticdl.job.messages import FACTS
from elasticdl.proto import elasticdl_pb2 as pb

MASTER = -1  # who is told, among the numbers of the processes
OF_ONE = "/"  # between the number of a process and the scope of its entry in the store
TOLD_OF_ALL = frozenset({"worker_stuck"})  # notices that count of each process; the others come from process 0 alone


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds. ``hold``: a failure waits so long, as its cause may be another process's death, which is heard a moment later.

    Once one process has ended with status 0, the others have ``alone``, or ``unsaid`` if it had not said that it would end. Where one has come to
    the end of the script and waits there, the others have ``ending``: one may have files to write.
    """

    hold: float = 1.0
    alone: float = 30.0
    unsaid: float = 2.0
    ending: float = 90.0


class Say(NamedTuple):
    """``message``: of a worker's kind if ``whom`` is the master, else of a master's."""

    whom: int
    message: Any


@dataclass(frozen=True, slots=True)
class Begin:
    """A session with the master. What is said to it from now on is said there."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the session with ``whom`` in peace, once all has been said."""

    whom: int


@dataclass(frozen=True, slots=True)
class Break:
    """End the session with ``whom`` at once. A process comes again; ``why``: as `GroupCore.master_lost` was told."""

    whom: int
    why: Any = None


@dataclass(frozen=True, slots=True)
class Terminate:
    """By SIGTERM, all processes, or all but one."""

    besides: int | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """All processes but one."""

    besides: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The worker ends with ``code``, and takes along what is left of its processes. ``log``, ``last_words``: for people."""

    code: int
    log: str = ""
    last_words: str = ""


Action: TypeAlias = Say | Begin | Close | Break | Terminate | Kill | Finish


class GroupCore:
    """The sessions of the processes, the one with the master, and the end of each process.

    The session with the master begins when all processes have come, and breaks when one goes: then all come again. ``now``: seconds, of any clock.
    """

    def __init__(self, size: int, waits: Waits | None = None) -> None:
        self.size = size
        self._waits = waits or Waits()
        self._hellos: dict[int, pb.Hello] = {}  # of the processes that have come, and not gone
        self._early: list[tuple[int, pb.WorkerMessage]] = []  # what these have said before all had come
        self._done: set[int] = set()  # of these, who say no more
        self._bundle: Bundle | None = None  # as long as there is a session with the master
        self._running = set(range(size))
        self._killed: set[int] = set()  # as another has failed
        self._may_end: set[int] = set()  # who have said that they end, or were told to
        self._ending: set[int] = set()  # who have come to the end of the script
        self._failed: dict[int, pb.WorkerMessage] = {}  # last words of who can't go on, in the order in which they came
        self._ends_apart = False  # nobody has failed, but some go on where the script has ended in others
        self._is_told = self._is_taken = False  # that failure: from now on in each session; and the master has it
        self._hold_until = self._apart_until = self._alone_until = math.inf

    # ---- time ----

    @property
    def due(self) -> float:
        """When `pass_time` is to be called."""
        return min(self._hold_until, self._apart_until, self._alone_until)

    def pass_time(self, now: float) -> list[Action]:
        actions: list[Action] = []
        if now >= self._apart_until:
            self._apart_until, self._ends_apart = math.inf, True
            others = [each for each in range(self.size) if each not in self._ending]
            text = f"the script has ended here, and goes on in processes {others}: let all processes of a worker make the same steps"
            self._fail(min(self._ending), pb.Failed(message=text, users=True, trained=True), now)
        if now >= self._hold_until:
            self._hold_until, self._is_told = math.inf, True
            actions += self._tell_failure()
        if now >= self._alone_until:
            self._alone_until = math.inf
            actions.append(self._end_others())
        return actions

    # ---- the processes' sessions ----

    def came(self, number: int, hello: pb.Hello, now: float) -> list[Action]:
        """A process has begun a session; its last one is `lost`."""
        assert self._bundle is None, "a session with the master has all processes"
        self._hellos[number] = hello
        if len(self._hellos) < self.size:
            return []
        self._bundle = Bundle(self.size)
        actions: list[Action] = [Begin(), self._bundle.hello([self._hellos[each] for each in range(self.size)])]
        if self._is_told:
            actions += self._tell_failure()
        early, self._early = self._early, []
        for each, message in early:
            actions += self._pass_on(self._bundle, each, message, now)
        return [*actions, *self._close()]

    def heard(self, number: int, message: pb.WorkerMessage, now: float) -> list[Action]:
        if message.WhichOneof("body") == "failed":
            self._fail(number, message.failed, now)
            return []
        if self._bundle is None:
            self._early.append((number, message))
            return []
        return self._pass_on(self._bundle, number, message, now)

    def said_all(self, number: int) -> list[Action]:
        """A process says no more in this session."""
        self._done.add(number)
        return [*self._end_failed(), *self._close()]

    def lost(self, number: int) -> list[Action]:
        """Its session is over."""
        self._hellos.pop(number, None)
        self._done.discard(number)
        self._early = [each for each in self._early if each[0] != number]
        return self._break_off()

    # ---- the session with the master ----

    def heard_of_master(self, message: pb.MasterMessage) -> list[Action]:
        if self._bundle is None:  # it comes behind the end of that session
            return []
        body = message.WhichOneof("body")
        if body in ("drain", "stop_work"):
            self._may_end.update(range(self.size))
        actions: list[Action] = [*self._bundle.of_master(message)]
        if body == "last_word_taken" and self._is_told:
            self._is_taken = True
            actions += self._end_failed()
        return actions

    def master_closed(self) -> list[Action]:
        """It has ended the session in peace."""
        return [Close(each) for each in self._forget()]

    def master_lost(self, why: Any) -> list[Action]:
        """``why``: the processes are told."""
        return [Break(each, why) for each in self._forget()]

    # ---- the end of a process ----

    def told_to_leave(self) -> list[Action]:
        """By a signal."""
        self._may_end.update(range(self.size))
        return [Terminate()]

    def exited(self, number: int, code: int, now: float) -> list[Action]:
        """``code``: negative for the signal that has killed it."""
        self._running.discard(number)
        if number in self._killed:  # who has failed may wait at its end for what another has left in a collective
            self._alone_until = now + self._waits.unsaid
        elif code:
            name = f"signal {-code}" if code < 0 else f"exit code {code}"
            log = f"process {number} of this worker has ended with {name}: the others are killed"
            return [Finish(code if code > 0 else 128 - code, log=log)]
        else:
            self._alone_until = now + (self._waits.alone if number in self._may_end else self._waits.unsaid)
        return [] if self._running else [Finish(0)]

    # ---- parts ----

    def _end_others(self) -> Finish:
        if self._killed:
            first = next(iter(self._failed))
            return Finish(1, log=f"process {first} of this worker has failed, and does not end: it is killed")
        text = (
            f"processes {sorted(self._running)} of this worker go on, where another's script has ended: end all alike"
        )
        # Code 2 is that of a script that can't train. Who was told to leave, or has come to the end of the training, has not shown that.
        return Finish(1 if self._may_end else 2, last_words=text)

    def _break_off(self) -> list[Action]:
        """One has gone: all that are left come again."""
        return [Break(MASTER), *(Break(each) for each in self._forget())] if self._bundle else []

    def _forget(self) -> list[int]:
        """The session with the master is over. Returns who had come."""
        came = sorted(self._hellos)
        self._bundle = None
        self._hellos, self._early, self._done = {}, [], set()
        return came

    def _pass_on(self, bundle: Bundle, number: int, message: pb.WorkerMessage, now: float) -> list[Action]:
        actions: list[Action] = []
        match message.WhichOneof("body"):
            case "draining":
                self._may_end.update(range(self.size))  # as the others are told
                if message.draining.lingers:
                    actions.append(Terminate(number))
            case "finished":
                self._may_end.add(number)
            case "heartbeat":
                self._look_at_end(number, message.heartbeat.ending, now)
        return [*actions, *bundle.of_process(number, message)]

    def _look_at_end(self, number: int, is_ending: bool, now: float) -> None:
        (self._ending.add if is_ending else self._ending.discard)(number)
        if not 0 < len(self._ending) < self.size:
            self._apart_until = math.inf
        elif not self._ends_apart:
            self._apart_until = min(self._apart_until, now + self._waits.ending)

    def _close(self) -> list[Action]:
        is_told = self._is_taken or not self._failed
        return [Close(MASTER)] if self._bundle and is_told and len(self._done) == self.size else []

    def _fail(self, number: int, failed: pb.Failed, now: float) -> None:
        if not self._failed:
            self._hold_until = now + self._waits.hold
        self._failed.setdefault(number, pb.WorkerMessage(failed=failed))

    def _tell_failure(self) -> list[Action]:
        """Of the process that has failed first."""
        if self._bundle is None:
            return []
        number, message = next(iter(self._failed.items()))
        told = pb.WorkerMessage()
        told.CopyFrom(message)
        told.failed.message = f"process {number} of the worker: {message.failed.message}"
        return [Say(MASTER, told)]

    def _end_failed(self) -> list[Action]:
        """Who has failed ends once the master has taken its word. The others would wait for it, or say that it is gone."""
        if not self._is_taken:
            return []
        if self._ends_apart:  # they wait for each other, and for nobody else
            return [Finish(1)]
        actions: list[Action] = []
        first, going = next(iter(self._failed)), sorted(self._done & self._failed.keys())
        if first in going:  # it alone: else two that have failed kill each other, and nobody's exit code counts
            self._killed |= self._running - {first}
            actions.append(Kill(first))
        for number in going:
            del self._hellos[number]
            actions.append(Close(number))
        return [*actions, *self._break_off()] if going else []


class Bundle:
    """What the processes of one worker say to the master as one, in one session, and what each of them is told. Pure.

    As soon as one of the streams breaks all are begun anew. So nothing is kept from session to session: each begins with everything that
    is still true (`elasticdl.elastic.core.worker.WorkerCore`).
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._asks: dict[int, pb.Ask] = {}
        self._beats: dict[int, pb.Heartbeat] = {}
        self._finished: dict[int, pb.Finished] = {}
        self._draining: list[pb.Draining] = []
        self._broken = 0  # newest world that one of them has found broken

    def hello(self, hellos: Sequence[pb.Hello]) -> Say:
        """``hellos``: of all processes. Where they are in different worlds the worker is in none."""
        versions = {each.world_version for each in hellos}
        hello = pb.Hello()
        hello.CopyFrom(hellos[0])
        hello.world_version = versions.pop() if len(versions) == 1 else 0
        hello.pid = os.getpid()
        return Say(MASTER, pb.WorkerMessage(hello=hello))

    def of_process(self, number: int, message: pb.WorkerMessage) -> list[Say]:
        """A process has said this. A failure is not passed on here: see `GroupCore`."""
        match message.WhichOneof("body"):
            case "ask":
                return self._ask(number, message.ask)
            case "heartbeat":
                return self._beat(number, message.heartbeat)
            case "draining":
                return self._drain(number, message.draining)
            case "finished":
                self._finished[number] = message.finished
                if len(self._finished) < self._size:
                    return []
                last = pb.Finished()
                last.CopyFrom(self._finished[0])
                last.together = all(each.together for each in self._finished.values())
                return [Say(MASTER, pb.WorkerMessage(finished=last))]
            case "kv_put":
                return self._put(number, message.kv_put)
            case "progress":
                return [Say(MASTER, message)] if number == 0 else []
            case "notice":
                return self._notice(number, message)
        return []

    def of_master(self, message: pb.MasterMessage) -> list[Say]:
        """The master has said this."""
        body = message.WhichOneof("body")
        if body == "saved":
            return [Say(0, message)]
        if body == "world":
            # It answers them: who has asked again in this session may be the only one that was not in it yet.
            self._asks = {each: ask for each, ask in self._asks.items() if ask.left_world >= message.world.version}
        if body != "kv_entry":
            return [Say(number, message) for number in range(self._size)]
        number, between, scope = message.kv_entry.scope.partition(OF_ONE)
        if not between:
            return []
        entry = pb.KvEntry()
        entry.CopyFrom(message.kv_entry)
        entry.scope = scope
        return [Say(int(number), pb.MasterMessage(kv_entry=entry))]

    def _ask(self, number: int, ask: pb.Ask) -> list[Say]:
        self._asks[number] = ask
        told: list[Say] = []
        if ask.broken and ask.left_world > self._broken:
            # The others need not wait for the master to hear of it.
            self._broken = ask.left_world
            broken = pb.MasterMessage(broken=pb.Broken(world_version=ask.left_world, reason=ask.reason))
            told = [Say(other, broken) for other in range(self._size) if other not in self._asks]
        if len(self._asks) == self._size:
            told.append(Say(MASTER, pb.WorkerMessage(ask=_one_ask(list(self._asks.values())))))
            self._asks = {}
        return told

    def _beat(self, number: int, beat: pb.Heartbeat) -> list[Say]:
        """One beat of all: a process that is frozen, or makes no progress, is the whole worker's affair."""
        self._beats[number] = beat
        if len(self._beats) < self._size:
            return []
        beats, self._beats = self._beats, {}
        every = list(beats.values())
        one = pb.Heartbeat()
        one.CopyFrom(beats[0])
        one.step, one.progress = min(each.step for each in every), min(each.progress for each in every)
        one.waiting, one.ending = all(each.waiting for each in every), all(each.ending for each in every)
        return [Say(MASTER, pb.WorkerMessage(heartbeat=one))]

    def _drain(self, number: int, draining: pb.Draining) -> list[Say]:
        if draining in self._draining:
            return []
        self._draining.append(draining)
        told: list[Say] = [Say(MASTER, pb.WorkerMessage(draining=draining))]
        if not draining.lingers:
            drain = pb.MasterMessage(drain=pb.Drain(reason=draining.reason))
            told += [Say(other, drain) for other in range(self._size) if other != number]
        return told

    def _put(self, number: int, put: pb.KvPut) -> list[Say]:
        if (put.scope, put.key) == FACTS:
            return [Say(MASTER, pb.WorkerMessage(kv_put=put))] if number == 0 else []
        own = pb.KvPut()
        own.CopyFrom(put)
        own.scope = f"{number}{OF_ONE}{put.scope}"
        return [Say(MASTER, pb.WorkerMessage(kv_put=own))]

    def _notice(self, number: int, message: pb.WorkerMessage) -> list[Say]:
        if number == 0:
            return [Say(MASTER, message)]
        told: list[Say] = [Say(number, pb.MasterMessage(saved=pb.Saved(number=message.number)))]
        if message.notice.event in TOLD_OF_ALL:
            fields = json.loads(message.notice.fields_json)
            notice = pb.Notice(
                event=message.notice.event,
                fields_json=json.dumps({**fields, "where": f"process {number}: {fields['where']}"}),
            )
            told.append(Say(MASTER, pb.WorkerMessage(notice=notice)))
        return told


def _one_ask(asks: Sequence[pb.Ask]) -> pb.Ask:
    """Where one of them stands behind the others, or holds no state, the worker does."""
    least = min(asks, key=lambda ask: (ask.has_state, ask.step, ask.epoch, ask.synced_in))
    one = pb.Ask()
    one.CopyFrom(least)
    if broken := next((ask for ask in asks if ask.broken), None):
        one.broken, one.reason = True, broken.reason
    return one
