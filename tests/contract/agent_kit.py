"""A master's real server with a desk for agents, in the test's process; real agents, and workers that end when they are told."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from functools import partial

import psutil

from elasticdl.common.credentials import PLACE, Token, WorkerEnvironment
from elasticdl.job.spec import JobSpec
from elasticdl.master.core.events import WorkerPending, WorkerPlaced
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.calls import Server, Servicer, Sessions, TokenAccess
from elasticdl.places.base import Place, PlaceState
from elasticdl.proto import elasticdl_pb2 as pb

DEADLINE = 60.0
TOKEN = Token("agents")
PRELOADED = "transformers"  # in its name a module of a few bytes, which workers are forked with
WORKER = f"""
import os, signal, subprocess, sys, time
def model():
    import {PRELOADED}
me = os.path.join(os.environ["WORK"], os.environ["ELASTICDL_WORKER_ID"])
if "DEAF" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: (print("told to leave", flush=True), sys.exit(7)))
if "DAEMON" in os.environ:
    daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__], start_new_session=True)
    open(me + ".daemon", "w").write(str(daemon.pid))
print("is forked:", {PRELOADED!r} in sys.modules, flush=True)
open(me + ".up", "w").close()
while not os.path.exists(me):
    time.sleep(0.01)
sys.exit(int(open(me).read()))
"""


class Mailbox:
    """Whether what was reported is saved, the test says."""

    def __init__(self):
        self.saved = asyncio.Event()
        self.saved.set()

    async def settled(self):
        await self.saved.wait()
        return True


class MasterOfAgents:
    """One of a job, with the reports of its desk."""

    def __init__(self, port, generation):
        self.generation = generation
        self.agents = Agents()
        self.agents.find_seconds = self.agents.close_seconds = DEADLINE
        self.agents.late_seconds = 0.0
        self.reports = asyncio.Queue()
        self.agents.reporting_to(self.reports.put_nowait)
        self.mailbox = Mailbox()
        self.server = Server("127.0.0.1", TokenAccess(TOKEN))
        self.port = self.server.bind(port)

    async def start(self):
        welcome = pb.Welcome(job_name="digits", generation=self.generation)
        parts = (None, asyncio.Event(), None, lambda: welcome, lambda workers: "")
        servicer = Servicer(self.mailbox, Sessions(), *parts, self.agents)
        await self.server.start(servicer)

    async def next(self, kind):
        report = await asyncio.wait_for(self.reports.get(), DEADLINE)
        assert isinstance(report, kind), report
        return report

    async def start_worker(self, worker_id, **environment):
        """In the first place; returns when it is placed, whether its agent was there or not."""
        self.agents.start(worker_id, place("place-0", **environment))
        report = await asyncio.wait_for(self.reports.get(), DEADLINE)
        if isinstance(report, WorkerPending):
            report = await self.next(WorkerPlaced)
        assert (type(report), report.worker_id) == (WorkerPlaced, worker_id)
        return report

    async def leave(self):
        """As one that is told to, or dies: its successor may come."""
        await self.agents.close(keep=True)
        await self.server.close()


class Agency:
    def __init__(self, folder, worker):
        self.folder, self.tell = folder, partial(tell, folder)
        self.processes = []
        self.masters = []
        (folder / "worker.py").write_text(worker)
        (folder / "packages").mkdir()
        (folder / "packages" / f"{PRELOADED}.py").write_text("")
        program = sys.executable, str(folder / "worker.py")
        spec = JobSpec.model_validate({"num_workers": "1", "command": program, "job_name": "digits"})
        (folder / "job.json").write_text(spec.to_json())

    async def master(self, port=0, find=()):
        """The next master, once it has found what there is in these places."""
        master = MasterOfAgents(port, len(self.masters) + 1)
        self.masters.append(master)
        await master.start()
        master.found = await asyncio.wait_for(master.agents.found([place(name) for name in find], {-1: ""}), DEADLINE)
        return master

    async def agent(self, port, name="place-0", token=TOKEN, **variables):
        environment = WorkerEnvironment(f"127.0.0.1:{port}", token, 0, str(self.folder / "job.json"))
        environ = {
            **os.environ,
            "WORK": str(self.folder),
            "PYTHONPATH": str(self.folder / "packages"),
            **environment.to_env(),
            PLACE: name,
            **variables,
        }
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "elasticdl.places.agent"),
            env=environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self.processes.append(agent)
        return agent

    async def up(self, worker_id):
        async with asyncio.timeout(DEADLINE):
            while not (self.folder / f"{worker_id}.up").exists():
                await asyncio.sleep(0.01)


def tell(folder, worker_id, code):
    """With which code to end."""
    (folder / f".{worker_id}").write_text(str(code))
    (folder / f".{worker_id}").rename(folder / str(worker_id))


def place(name, **environment):
    return Place(name, "node-1", state=PlaceState.READY, environment=environment)


async def end_of(agent):
    """Its exit code, and what it has printed."""
    out, log = await asyncio.wait_for(agent.communicate(), DEADLINE)
    return agent.returncode, out.decode(), log.decode()


@asynccontextmanager
async def acting(tmp_path, worker=WORKER):
    """Nothing of a scene stays."""
    scene = Agency(tmp_path, worker)
    try:
        yield scene
    finally:
        for agent in scene.processes:
            if agent.returncode is None:
                agent.send_signal(signal.SIGKILL)
            await agent.communicate()
        for master in scene.masters:
            await master.server.close()
    script = str(tmp_path / "worker.py")
    assert not [each for each in psutil.process_iter(["cmdline"]) if script in (each.info["cmdline"] or ())]
