"""A master's real server, without a job behind it."""

import asyncio
import threading
import time
from contextlib import contextmanager

from elasticdl.cli.job_handle import MasterClient
from elasticdl.common.channel import open_channel
from elasticdl.common.credentials import Endpoint
from elasticdl.master.core.events import FromWorker
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.calls import Server, Servicer, Sessions
from elasticdl.master.shell.journal_file import Journal
from elasticdl.proto import elasticdl_pb2 as pb

DEADLINE = 30.0


@contextmanager
def connect(master):
    """A client of the command line's, which is closed at the end."""
    with open_channel(master.address, master.credentials) as channel:
        yield MasterClient(channel, master)


def _told(event):
    return event.said if isinstance(event, FromWorker) else event


class ServedMaster:
    """Listens in a thread of its own; ``events`` are what its handlers have posted. ``takes``: it lives to act upon them."""

    def __init__(self, access, journal):
        self.events = []
        self.takes = True
        self.status = pb.JobStatus(job_name="digits", phase="running", min_workers=1, max_workers=2)
        self.port = 0
        self._access = access
        self._journal = journal
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def endpoint(self, credentials):
        return Endpoint(f"127.0.0.1:{self.port}", credentials, "the master of job digits")

    def start(self, port):
        self.port = port
        self._thread.start()
        assert self._up.wait(DEADLINE)
        assert self.port

    def wait_for(self, kind, count):
        """The first so many events of a kind, or messages of workers."""
        deadline = time.monotonic() + DEADLINE
        while len(found := [each for each in map(_told, self.events) if isinstance(each, kind)]) < count:
            assert time.monotonic() < deadline, self.events
            time.sleep(0.01)
        return found[:count]

    def stop(self):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()

    def post(self, event):
        self.events.append(event)

    async def settled(self):
        """Nothing is done with the events. ``takes`` None: nothing is saved either."""
        if self.takes is None:
            await asyncio.Event().wait()
        return self.takes

    async def _serve(self):
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        sessions = Sessions()
        status, ended = self.status, asyncio.Event()
        journal = Journal(self._journal)
        server = Server("127.0.0.1", self._access)
        try:
            self.port = server.bind(self.port)
            welcome = pb.Welcome(job_name="digits")
            parts = (sessions, lambda: status, ended, journal, lambda: welcome, lambda workers: "", Agents())
            await server.start(Servicer(self, *parts))
        finally:
            self._up.set()
        await self._over.wait()
        ended.set()
        journal.close()
        await server.close()


@contextmanager
def serving(access, journal, port=0):
    """Serve until the end of the context."""
    master = ServedMaster(access, journal)
    master.start(port)
    try:
        yield master
    finally:
        master.stop()
