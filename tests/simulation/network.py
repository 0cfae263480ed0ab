"""A worker's stream to a master: messages arrive late and in order, and are lost with the stream that carries them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.link.wire import to_event, to_proto
from elasticdl.job import messages as m
from elasticdl.proto import elasticdl_pb2 as pb

if TYPE_CHECKING:
    from tests.simulation.group import Group, Relay
    from tests.simulation.masters import Master
    from tests.simulation.process import Process

Caller: TypeAlias = "Process | Group"  # opens a stream
Answerer: TypeAlias = "Master | Relay"
Link: TypeAlias = "Session | Relay"  # by which a worker keeps a stream to a master open

LATENCY = 0.0005
RECONNECT_SECONDS = 0.2
CLOSE_SECONDS = 5.0
MASTER_TIMEOUT = 30.0


class Stream:
    """Between one worker and one master. Each end learns by itself, and later, that it is broken."""

    def __init__(self, process: Caller, master: Answerer) -> None:
        self.process = process
        self.master = master
        self.broken = False
        self.greeted = False  # the master has heard Hello
        self.replaced = False
        self._site = process.site
        self._up = self._down = 0.0  # when the latest message arrives

    def send_up(self, message: bytes | None) -> None:
        """None: the worker has no more to say."""
        self._up = max(self._up, self._site.clock.now + self._delay())
        self._site.clock.after(self._up - self._site.clock.now, self._arrive_up, message)

    def send_down(self, message: bytes | None) -> None:
        """None: the master ends the session."""
        self._down = max(self._down, self._site.clock.now + self._delay())
        self._site.clock.after(self._down - self._site.clock.now, self._arrive_down, message)

    def close(self, *, noticed: float = 0.02) -> None:
        """It breaks. ``noticed``: the longest that an end may take to see it."""
        if self.broken:
            return
        self.broken = True
        self.process.session.cut_from[self.master.generation] = self._site.clock.now
        draw, clock = self._site.draw_network, self._site.clock
        clock.after(draw.uniform(0, noticed), self.process.call, self.process.session.lose, self)
        clock.after(draw.uniform(0, noticed), self.master.lose, self)

    def _delay(self) -> float:
        draw = self._site.draw_network
        return LATENCY * (20.0 if draw.random() < 0.02 else 1.0 + draw.random())

    def _arrive_up(self, message: bytes | None) -> None:
        if not self.broken:
            self.master.hear(self, message)

    def _arrive_down(self, message: bytes | None) -> None:
        if not self.broken:
            self.process.call(self.process.session.hear, self, message)


class Session:
    """The worker's end: it keeps a stream open, as `elasticdl.elastic.link.stream` does."""

    def __init__(self, process: Process) -> None:
        self.blocked_until = 0.0
        self.closing = False
        self.stream: Stream | None = None
        self.cut_from: dict[int, float] = {}  # by generation of the master: when the last stream to it broke
        self._process = process
        self._site = process.site
        self._unsent: list[m.Message] = []
        self._last_contact = self._site.clock.now
        self._given_up = False

    def open(self) -> None:
        process, clock = self._process, self._site.clock
        if self.stream is not None or self._over:
            return
        master = process.answerer() if clock.now >= self.blocked_until else None
        if master is not None:
            self.stream = Stream(process, master)
            self._send_greeting()
        elif clock.now - self._last_contact > MASTER_TIMEOUT:
            self._given_up = True
            process.tell(p.MasterLost("no master"))
            process.session_over()
        else:
            clock.after(RECONNECT_SECONDS, process.call, self.open)

    def send(self, message: m.Message) -> None:
        if self.stream is not None:
            self.stream.send_up(to_proto(message, self._process.environment).SerializeToString())
        elif isinstance(message, m.Notice):  # the next stream brings it (`elastic.link.stream`)
            self._unsent.append(message)

    def end_stream(self) -> None:
        """The worker does not want this master."""
        if self.stream is not None:
            self.stream.close()

    def close(self) -> None:
        """Say what is still to be said, and wait (bounded) for the master to take it."""
        self.closing = True
        patience = MASTER_TIMEOUT if self._process.last_word else 0.0
        self._site.clock.after(CLOSE_SECONDS + patience, self._process.call, self._process.session_over)
        if self.stream is not None:
            self.stream.send_up(None)
        elif self._over:
            self._process.session_over()

    def hear(self, stream: Stream, message: bytes | None) -> None:
        if stream is not self.stream:
            return
        self._last_contact = self._site.clock.now
        if message is None:
            stream.broken = True
            self._end()
            return
        parsed = pb.MasterMessage.FromString(message)
        if parsed.WhichOneof("body") == "kv_entry":
            entry = parsed.kv_entry
            self._process.entry_came(entry.world_version, entry.key)
        elif (event := to_event(parsed)) is not None:
            self._process.tell(event)

    def lose(self, stream: Stream) -> None:
        if stream is self.stream:
            self.stream = None
            self._reopen()

    @property
    def _over(self) -> bool:
        return self._given_up or (self.closing and not self._process.last_word)

    def _send_greeting(self) -> None:
        unsent, self._unsent = tuple(self._unsent), []
        self._process.tell(p.SessionOpened(unsent))
        if self.closing and self.stream is not None:
            self.stream.send_up(None)

    def _end(self) -> None:
        """The master has ended the session: it has taken everything, or another stream of this worker is open."""
        stream, self.stream = self.stream, None
        if self.closing and stream is not None and not stream.replaced:
            if self._process.last_word:
                self._site.checks.acknowledged(self._process)
            self._process.session_over()
        else:
            self._reopen()

    def _reopen(self) -> None:
        if self._over:
            self._process.session_over()
        else:
            self._site.clock.after(RECONNECT_SECONDS, self._process.call, self.open)
