"""The master's desk for agents: what it orders and reports, by lists of what late and silent agents say."""

import asyncio
import re

import pytest

from elasticdl.master.core.events import FoundWorker, StacksFound, WorkerExited, WorkerPlaced
from elasticdl.master.shell import agents as module
from elasticdl.master.shell.agents import Agents
from elasticdl.places.base import Place, PlaceState
from elasticdl.proto import elasticdl_pb2 as pb
from tests.stories import check, parts_of, settings_of, told_in

AT_ONCE, NEVER = 0.0, 1000.0  # seconds

# All times are over at once; `patient`: that for agents to come never is. An agent gets what it is ordered: `a start` and so on.
STORIES = """
a worker that no agent has heard of is taken back
  begin; start 0 in a; end 0 -> exited 0 killed -9: it was not started yet
  a comes -> nothing
what an agent has not heard it is ordered again
  begin; a comes; start 0 in a; end 0 -> a start; a end
  a closes; a comes -> a start; a end
  a comes running 0 -> a end of stream; a end; placed 0 on node-a at host-a

a worker whose agent is late counts as found where the earlier master had it, so that others need not wait (patient)
  begin a b remembering 3:a 4:elsewhere -> found 3 in a on node-a
  a comes running 3 -> placed 3 on node-a at host-a
a worker whose agent is late may have ended (patient)
  begin a b remembering 3:a 4:elsewhere; a comes untold 3 code 0 -> a end_taken; found 3 in a on node-a;
      exited 3 clean 0: exit code 0
an earlier masters worker that comes late is shown and can be ended
  begin a; start 0 in a; a comes running 8 -> a start; placed 8 on node-a at host-a
  a ended 8 code 0; a started 9 -> a end_taken; exited 8 clean 0; placed 9 on node-a at host-a
  end 9 -> a end
  a ended 9 code -9; a started 0 -> a end_taken; exited 9 killed -9; placed 0 on node-a at host-a
a worker ends with its agent and not with a stream
  begin; a comes; start 0 in a; a started 0 -> a start; placed 0 ...
  a closes; look at 0 -> stacks 0: the agent of its place does not answer
  a comes running 0 -> nothing
  a comes -> a end of stream; exited 0 killed -9: the agent that had started it is gone
nothing is told of a place that is lost and who shows up there leaves
  begin; a comes; start 0 in a; lose a; a ended 0 code 0 -> a start; a leave
  a comes running 0 -> a end of stream; a leave
  end 0 -> nothing
who closes kills and lets nobody wait for what is saved
  begin; a comes; start 0 in a; unsaved; start 7 in b; b comes untold 7 code 0 -> a start; exited 7 clean 0
  close -> a end; a leave; b leave
  a ended 0 code -9 -> a end_taken; exited 0 killed -9
  start 1 in a; c comes -> c leave
of a worker whose agent is silent it is said that nothing is seen
  begin; a comes; start 0 in a; a started 0; look at 0; a looked 0: File -> a start; a read_stacks; placed 0 ...;
      stacks 0: File
  look at 0 -> a read_stacks; stacks 0: the agent of its place does not answer
"""


def place(name):
    return Place(name, f"node-{name}", state=PlaceState.READY, environment={"GPU": name})


class Desk:
    def __init__(self, *, patient=False):
        self.agents = Agents()
        self.agents.find_seconds = NEVER if patient else AT_ONCE
        self.agents.soon_seconds = self.agents.close_seconds = self.agents.late_seconds = AT_ONCE
        self.reports, self.lines, self.streams, self.saved = [], {}, [], True
        self.agents.reporting_to(self.reports.append)

    async def settled(self):
        return self.saved

    async def do(self, events):
        """All that is ordered and reported, in words."""
        for each in parts_of(events):
            words, _, text = each.partition(": ")
            await self.happens(*words.split(), text=text)
        for _ in range(4):  # turns of the event loop, until what is due at once has happened
            await asyncio.sleep(0)
        orders = [f"{name} {order}" for name, line in self.streams for order in taken(line)]
        reports, self.reports[:] = list(self.reports), []
        return [*orders, *map(in_words, reports)]

    async def happens(self, what, *more, text):
        match what, *more:
            case "begin", *places:
                places, _, remembered = " ".join(places).partition("remembering")
                # If nobody is named: somebody, whose place is not known.
                held = [each.split(":") for each in remembered.split()] or [("-1", "")]
                known = {int(worker): where for worker, where in held}
                async with asyncio.timeout(20):
                    self.reports += await self.agents.found([place(each) for each in places.split()], known)
                await asyncio.sleep(0)
            case "start", worker, "in", name:
                self.agents.start(int(worker), place(name))
            case "end", worker:
                self.agents.end(int(worker), 5.0)
            case "look", "at", worker:
                self.agents.read_stacks(int(worker))
            case "lose", name:
                self.agents.lost(name)
            case ["unsaved"]:
                self.saved = False
            case ["close"]:
                await self.agents.close()
            case name, "comes", *first:
                self.comes(name, given(first))
            case name, "closes":
                self.agents.closed(self.lines[name], name)
            case name, "started", worker:
                self.says(name, started=pb.Started(worker_id=int(worker), pid=1))
            case name, "ended", worker, *how:
                self.says(name, ended=ended(worker, given(how), text))
            case name, "looked", worker:
                self.says(name, looked=pb.Looked(worker_id=int(worker), text=text))
            case _:
                raise ValueError(what, more)

    def says(self, name, **body):
        self.agents.hear(self.lines[name], name, pb.AgentMessage(**body))

    def comes(self, name, first):
        hello = pb.AgentHello(place=name, node=f"node-{name}", host=f"host-{name}")
        if "untold" in first:
            hello.untold.append(ended(first["untold"], first, ""))
        if "running" in first:
            hello.running.CopyFrom(pb.Started(worker_id=int(first["running"]), pid=1))
        self.lines[name] = self.agents.open(hello, self.settled)
        self.streams.append((name, self.lines[name]))
        if self.agents.begun.is_set():
            self.agents.greet(self.lines[name], hello)


def given(words):
    return dict(zip(words[::2], words[1::2], strict=True))


def ended(worker, how, output):
    return pb.Ended(worker_id=int(worker), code=int(how["code"]), output=output)


def taken(line):
    while not line.waiting.empty():
        order = line.waiting.get_nowait()
        yield "end of stream" if order is None else order.WhichOneof("body")


def in_words(report):
    match report:
        case FoundWorker(worker, _, _, _, node, where):
            return f"found {worker} in {where} on {node}"
        case WorkerPlaced(worker, host, _, node):
            return f"placed {worker} on {node} at {host}"
        case WorkerExited(worker, cause, code, detail, output):
            return f"exited {worker} {cause} {code}: {detail}" + (f" | {output}" if output else "")
        case StacksFound(worker, text, state):
            return f"stacks {worker}: {text or state}"
    raise ValueError(report)


@pytest.mark.parametrize("story", told_in(STORIES))
def test_agents(story, monkeypatch):
    monkeypatch.setattr(module, "STACKS_SECONDS", AT_ONCE)

    async def whole():
        title, *lines = story
        desk = Desk(patient="patient" in settings_of(title))
        for line in lines:
            check(line, await desk.do(re.sub("->.*", "", line)))

    asyncio.run(whole())
