"""A worker of several processes: what they say as one, their sessions, and how they end."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import grpc
import psutil
import pytest
from google.protobuf import text_format

from elasticdl.common.channel import SERVER_OPTIONS, metadata
from elasticdl.common.credentials import PROCESS, PROCESSES, STACKS, TOKEN, Token, WorkerEnvironment
from elasticdl.job import messages as m
from elasticdl.job.spec import JobSpec
from elasticdl.master.core.events import FromWorker, WorkerDisconnected
from elasticdl.master.shell.calls import TokenAccess
from elasticdl.places.group_core import (
    MASTER,
    Break,
    Bundle,
    Close,
    Finish,
    GroupCore,
    Kill,
    Say,
    Terminate,
    Waits,
)
from elasticdl.places.worker_group import Relay, main
from elasticdl.places.worker_process import Spawner
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc
from tests.contract.test_access import DEADLINE, serving
from tests.contract.test_access import TOKEN as OF_MASTER
from tests.stories import check, on, parts_of, settings_of, told_in
from tests.waiting import wait_until

# Who says what, as protobuf writes it, and who is told what.
BUNDLE = r"""
asks are passed on when all have asked and the least one counts
  0: ask { left_world: 4 step: 7 has_state: true epoch: 1 synced_in: 4 } -> nothing
  1: ask { left_world: 4 step: 7 has_state: true synced_in: 4 }
      -> master: ask { left_world: 4 step: 7 has_state: true synced_in: 4 }
  1: ask { left_world: 5 step: 9 has_state: true } -> nothing
  0: ask { left_world: 5 step: 8 has_state: true } -> master: ask { left_world: 5 step: 8 has_state: true }
a world answers who has asked again while the others are in it already
  0: ask { left_world: 3 step: 7 } -> nothing
  master: world { version: 4 size: 2 } -> 0: world { ... }; 1: world { ... }
  1: ask { left_world: 4 step: 9 } -> nothing
  master: world { version: 4 size: 2 } -> 0: world { ... }; 1: world { ... }
  0: ask { left_world: 4 step: 9 } -> master: ask { left_world: 4 step: 9 }
where one process holds no state the worker holds none
  0: ask { left_world: 4 step: 7 has_state: true }; 1: ask { step: 9 } -> master: ask { step: 9 }
one whose world has broken breaks that of the others who have not asked (processes=3)
  1: ask { left_world: 4 } -> nothing
  0: ask { left_world: 4 step: 3 broken: true reason: "a sum failed" }
      -> 2: broken { world_version: 4 reason: "a sum failed" }
  2: ask { left_world: 4 broken: true reason: "told" }
      -> master: ask { left_world: 4 broken: true reason: "a sum failed" }
a world that has broken is told of once (processes=3)
  0: ask { left_world: 4 broken: true reason: "a" } -> 1: broken { ... }; 2: broken { ... }
  1: ask { left_world: 4 broken: true reason: "b" } -> nothing

the worker beats when all have and is as far as the last of them
  0: heartbeat { world_version: 4 step: 7 progress: 70 waiting: true ending: true } -> nothing
  0: heartbeat { world_version: 4 step: 8 progress: 80 waiting: true ending: true } -> nothing
  1: heartbeat { world_version: 4 step: 7 progress: 90 waiting: true }
      -> master: heartbeat { world_version: 4 step: 7 progress: 80 waiting: true }
  1: heartbeat { world_version: 4 step: 8 } -> nothing

who was told to leave tells the others and all say it once
  1: draining { reason: "SIGTERM" } -> master: draining { reason: "SIGTERM" }; 0: drain { reason: "SIGTERM" }
  0: draining { reason: "SIGTERM" } -> nothing
while the only worker lingers its processes train on
  0: draining { reason: "SIGTERM" lingers: true } -> master: draining { reason: "SIGTERM" lingers: true }
  1: draining { reason: "SIGTERM" lingers: true } -> nothing
  0: draining { reason: "SIGTERM" } -> master: draining { reason: "SIGTERM" }; 1: drain { reason: "SIGTERM" }

facts and progress are those of process 0
  1: kv_put { scope: "job" key: "facts" value: "v" }; 1: progress { total_steps: 9 } -> nothing
  0: kv_put { scope: "job" key: "facts" value: "v" } -> master: kv_put { scope: "job" key: "facts" value: "v" }
  0: progress { total_steps: 9 } -> master: progress { total_steps: 9 }
in the store processes of one number meet
  1: kv_put { world_version: 4 scope: "a/b" key: "k" value: "v" }
      -> master: kv_put { world_version: 4 scope: "1/a/b" key: "k" value: "v" }
  master: kv_entry { world_version: 4 scope: "1/a/b" key: "k" value: "v" }
      -> 1: kv_entry { world_version: 4 scope: "a/b" key: "k" value: "v" }
  master: kv_entry { scope: "job" key: "facts" value: "v" } -> nothing

the worker has finished when all have
  1: finished { step: 7 epochs: 1 together: true } -> nothing
  0: finished { step: 7 epochs: 1 metrics { key: "loss" value: 0.5 } together: true }
      -> master: finished { step: 7 epochs: 1 metrics { key: "loss" value: 0.5 } together: true }
it has finished together with others if all of its processes say so
  0: finished { step: 7 together: true }; 1: finished { step: 7 } -> master: finished { step: 7 }

what others than process 0 note is taken for saved
  0: notice { event: "warning" fields_json: "{}" } number: 3
      -> master: notice { event: "warning" fields_json: "{}" } number: 3
  1: notice { event: "warning" fields_json: "{}" } number: 5 -> 1: saved { number: 5 }
  master: saved { number: 3 } -> 0: saved { number: 3 }
where one of them is stuck is told of each by its number
  1: notice { event: "worker_stuck" fields_json: "{\"where\": \"x.py:3 in load\", \"moves\": false}" } number: 6
      -> 1: saved { number: 6 };
      master: notice { event: "worker_stuck" fields_json: "{\"where\": \"process 1: x.py:3 in load\", \"moves\": false}" }

whatever else the master says is for all
  for BODY in change { world_version: 4 }, world { version: 4 size: 2 }, dump_stacks { }, last_word_taken { }, welcome { }
  master: BODY -> 0: BODY; 1: BODY
"""


# What becomes of the sessions and of the processes.
CORE = r"""
the session begins when all have come and nothing is lost that one has said before
  0 comes; 0: ask { step: 7 } -> nothing
  1 comes -> begin; master: hello { ... }
  1: ask { step: 7 } -> master: ask { step: 7 }
if one of them goes all come again and what was said is not counted (there)
  0: ask { step: 7 }; 0 is lost -> break master; break 1
  0: ask { step: 8 }; 0 is lost; 1 comes -> nothing
  0 comes -> begin; master: hello { ... }
  1: ask { step: 7 } -> nothing
if the master goes the processes come again and are told why (there)
  master is lost -> break 0: gone; break 1: gone
  1 comes; 0 comes -> begin; ...
the session ends when none has more to say (there)
  0 is done -> nothing
  1 is done -> close master
  master closes -> close 0; close 1
who is done before all have come and comes again has more to say
  0 comes; 0 is done; 0 is lost; 0 comes; 1 comes; 1 is done -> begin; master: hello { ... }
who is done before all have come is so in the session
  0 comes; 0: finished { step: 7 }; 0 is done; 1 comes; 1: finished { step: 7 }
      -> begin; master: hello { ... }; master: finished { step: 7 }
  1 is done -> close master

a failure waits for its cause and the one that came first is told (there)
  1: failed { message: "no memory" } -> due = 1.0
  tick 0.5; 0: failed { message: "another is gone" }; 0: progress { total_steps: 9 } -> master: progress { ... }
  tick 0.4 -> nothing
  tick 0.1 -> master: failed { message: "process 1 of the worker: no memory" }
who has failed ends when the master has its word and the others are killed (there)
  1: failed { message: "no memory" }; 1 is done; tick 1 -> master: failed { ... }
  master: last_word_taken { } -> 0: last_word_taken { }; 1: last_word_taken { }; kill all but 1; close 1; break master; break 0
  0 exits -9; 1 exits 1 -> finish 1: process 1 of this worker has ended with exit code 1: the others are killed
if it does not end it is killed as well (there)
  1: failed { message: "no memory" }; 1 is done; tick 1; master: last_word_taken { } -> ...
  0 exits -9 -> due = 3.0
  tick 2 -> finish 1: process 1 of this worker has failed, and does not end: it is killed
it may end later than its word is taken (there)
  1: failed { message: "no memory" }; tick 1; master: last_word_taken { } -> ...; 1: last_word_taken { }
  1 is done -> kill all but 1; close 1; break master; break 0
if all have failed it is the first that ends by itself (there)
  1: failed { message: "no memory" }; 0: failed { message: "another is gone" }; 0 is done; 1 is done; tick 1
      -> master: failed { ... }
  master: last_word_taken { } -> ...; kill all but 1; close 0; close 1; break master
a failure that a lost master was told is told the next (there)
  1: failed { message: "no memory" }; tick 1 -> master: failed { ... }
  master is lost; 0 comes; 1 comes -> ...; begin; master: hello { ... }; master: failed { ... }
a failure while no master is there is told the next
  0 comes; 0: failed { message: "no memory" }; tick 1 -> nothing
  1 comes -> begin; master: hello { ... }; master: failed { ... }
an answer to somebody else's last word ends nobody (there)
  1: failed { message: "no memory" }; 1 is done; master: last_word_taken { } -> 0: last_word_taken { }; 1: last_word_taken { }

who is told to leave by a signal while it lingers has all told by one (there)
  1: draining { reason: "SIGTERM" lingers: true } -> terminate all but 1; master: draining { ... }

the worker ends with the last of its processes
  1 exits 0 -> nothing
  0 exits 0 -> finish 0
the first that fails ends the worker
  1 exits 3 -> finish 3: process 1 of this worker has ended with exit code 3: the others are killed
a signal is told as a shell tells it
  1 exits -9 -> finish 137: process 1 of this worker has ended with signal 9: the others are killed
who ends without a word has the others end soon
  1 exits 0 -> due = 2.0
  tick 2 -> finish 2: processes [0] of this worker go on, where another's script has ended: end all alike
who has said that it ends gives the others time (there)
  for WORD in draining { }, finished { }
  1: WORD; 1 exits 0 -> ...; due = 30.0
  tick 30 -> finish 1: processes [0] of this worker go on, ...
who was told to leave by a signal gives the others time
  all get SIGTERM -> terminate all
  1 exits 0 -> due = 30.0
who was told to leave by the master gives the others time (there)
  for WORD in drain { }, stop_work { }
  master: WORD; 1 exits 0 -> ...; due = 30.0

where the script has ended in one alone it has failed there (there)
  0: heartbeat { ending: true }; 1: heartbeat { } -> ...; due = 90.0
  tick 90 -> nothing
  tick 1 -> master: failed { message: "process 0 of the worker: the script has ended here, and goes on in processes [1]: ..." trained: true users: true }
  master: last_word_taken { } -> 0: last_word_taken { }; 1: last_word_taken { }; finish 1
those who come to the end one after the other have not (there)
  0: heartbeat { ending: true }; 1: heartbeat { }; tick 80 -> ...
  1: heartbeat { ending: true } -> due = inf
"""


def as_told(action):
    """As the stories have it."""
    match action:
        case Say(whom, message):
            return f"{name_of(whom)}: {text_format.MessageToString(message, as_one_line=True)}"
        case Close(whom):
            return f"close {name_of(whom)}"
        case Break(whom, why):
            return f"break {name_of(whom)}" + f": {why}" * bool(why)
        case Kill(besides) | Terminate(besides):
            return f"{type(action).__name__.lower()} all" + ("" if besides is None else f" but {besides}")
        case Finish(code, log, last_words):
            return f"finish {code}" + f": {log}{last_words}" * bool(log or last_words)
        case _:
            return type(action).__name__.lower()


def name_of(whom):
    return "master" if whom == MASTER else str(whom)


@pytest.mark.parametrize("story", told_in(BUNDLE))
def test_what_processes_say_as_one(story):
    title, *lines = story
    bundle = Bundle(int(settings_of(title).get("processes", 2)))
    for line in lines:
        said = []
        for part in parts_of(line.partition("->")[0]):
            who, _, text = part.partition(": ")
            if who == "master":
                said += bundle.of_master(text_format.Parse(text, pb.MasterMessage()))
            else:
                said += bundle.of_process(int(who), text_format.Parse(text, pb.WorkerMessage()))
        check(line, list(map(as_told, said)))


@pytest.mark.parametrize("story", told_in(CORE))
def test_how_sessions_and_processes_end(story):
    title, *lines = story
    core, now = GroupCore(2), 0.0

    def happen(what):
        nonlocal now
        who, _, text = what.partition(": ") if ": " in what.partition("{")[0] else what.partition(" ")
        match who, *text.split():
            case "tick", seconds:
                now = round(now + float(seconds), 3)
                return core.pass_time(now)
            case "master", "closes":
                return core.master_closed()
            case "master", "is", "lost":
                return core.master_lost("gone")
            case "all", "get", "SIGTERM":
                return core.told_to_leave()
            case "master", *_:
                return core.heard_of_master(text_format.Parse(text, pb.MasterMessage()))
            case _, "comes":
                return core.came(int(who), HELLO, now)
            case _, "is", "done":
                return core.said_all(int(who))
            case _, "is", "lost":
                return core.lost(int(who))
            case _, "exits", code:
                return core.exited(int(who), int(code), now)
            case _:
                return core.heard(int(who), text_format.Parse(text, pb.WorkerMessage()), now)

    if "there" in settings_of(title):
        happen("0 comes"), happen("1 comes")
    for line in lines:
        told = [action for part in parts_of(line.partition("->")[0]) for action in happen(part)]
        check(line, list(map(as_told, told)), lambda name: str(getattr(core, name)))


@pytest.mark.parametrize(("worlds", "world"), [((4, 4), 4), ((4, 5), 0), ((0, 4), 0)])
def test_a_worker_whose_processes_are_in_different_worlds_is_in_none(worlds, world):
    said = Bundle(2).hello([pb.Hello(worker_id=3, host="h", world_version=each, pid=1) for each in worlds])
    hello = said.message.hello
    assert (hello.worker_id, hello.host, hello.pid, hello.world_version) == (3, "h", os.getpid(), world)


# ---- sessions ----


class Process:
    """One of the worker, by its stream."""

    def __init__(self, channel, token):
        self.call = pb_grpc.MasterStub(channel).Session(metadata=metadata(Token(token)))

    async def say(self, *messages):
        for message in messages:
            await self.call.write(pb.WorkerMessage(**{type(message).__name__.lower(): message}))

    async def hears(self):
        """What kind of message is next, or how the stream has ended."""
        try:
            message = await asyncio.wait_for(self.call.read(), DEADLINE)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK if message is grpc.aio.EOF else message.WhichOneof("body")


@asynccontextmanager
async def relayed(tmp_path):
    """A worker of two processes between them and a master."""
    with serving(TokenAccess(OF_MASTER), tmp_path / "journal.jsonl") as master:
        killed = []
        core = GroupCore(2, Waits(hold=0.3))
        relay = Relay(WorkerEnvironment(f"127.0.0.1:{master.port}", OF_MASTER, 3, "job.json"), core, killed.append)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        pb_grpc.add_MasterServicer_to_server(relay, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()

        def said():
            return [each.said for each in master.events if isinstance(each, FromWorker)]

        async def has(condition):
            await asyncio.to_thread(wait_until, condition, lambda: master.events, DEADLINE / 3)

        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

            async def come(number, *more):
                process = Process(channel, relay.tokens[number])
                await process.say(HELLO, *more)
                return process

            yield SimpleNamespace(
                master=master, relay=relay, channel=channel, come=come, said=said, has=has, killed=killed
            )
        relay.stop()
        await server.stop(0)


HELLO = pb.Hello(worker_id=3, host="127.0.0.1", pid=1)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def bodies(said):
    return [type(each).__name__ for each in said]


@on(relayed)
async def test_who_is_none_of_the_processes_is_refused(worker):
    for token, first in ((OF_MASTER.value, HELLO), ("", HELLO), (worker.relay.tokens[0], pb.Ask())):
        stranger = Process(worker.channel, token)
        with suppress(grpc.aio.AioRpcError):  # it may be refused before it has said a word
            await stranger.say(first)
        assert await stranger.hears() is grpc.StatusCode.PERMISSION_DENIED


@on(relayed)
async def test_the_workers_session_begins_when_all_are_there_and_nothing_is_lost_that_one_has_said_before(worker):
    first = await worker.come(0, pb.Ask(step=7, has_state=True))
    await asyncio.sleep(0.1)
    assert worker.said() == []
    second = await worker.come(1, pb.Ask(step=7, has_state=True))
    assert [await first.hears(), await second.hears()] == ["welcome", "welcome"]
    await worker.has(lambda: len(worker.said()) > 1)
    assert bodies(worker.said()) == ["Hello", "Ask"]


@on(relayed)
async def test_if_the_session_of_one_breaks_all_come_anew(worker):
    first, second = await worker.come(0), await worker.come(1, pb.Ask())
    assert [await first.hears(), await second.hears()] == ["welcome", "welcome"]
    first.call.cancel()
    assert await second.hears() is UNAVAILABLE
    await worker.has(lambda: WorkerDisconnected(3) in worker.master.events)
    second = await worker.come(1, pb.Ask())
    first = await worker.come(0, pb.Ask())
    assert [await first.hears(), await second.hears()] == ["welcome", "welcome"]
    await worker.has(lambda: len(worker.said()) > 2)
    assert bodies(worker.said()) == ["Hello", "Hello", "Ask"], "what was said in the first session is not counted"


@on(relayed)
async def test_who_has_failed_ends_when_the_master_has_taken_that_and_the_others_are_killed(worker):
    first, second = await worker.come(0), await worker.come(1)
    assert [await first.hears(), await second.hears()] == ["welcome", "welcome"]
    await second.say(pb.Failed(message="no memory"))
    await second.call.done_writing()
    heard = [[await each.hears() for _ in range(2)] for each in (second, first)]
    assert heard == [["last_word_taken", grpc.StatusCode.OK], ["last_word_taken", UNAVAILABLE]]
    assert worker.said()[1] == m.Failed(False, "process 1 of the worker: no memory")
    assert worker.killed == [Kill(besides=1)]


@on(relayed)
async def test_who_has_finished_ends_in_peace_with_the_others(worker):
    processes = [await worker.come(0), await worker.come(1)]
    for process in processes:
        await process.say(pb.Finished(step=7, epochs=1, together=True))
        await process.call.done_writing()
    for process in processes:
        heard = [await process.hears() for _ in range(3)]
        assert heard == ["welcome", "last_word_taken", grpc.StatusCode.OK]
    assert worker.said()[1:] == [m.Finished(7, 1, {}, together=True)]


# ---- the processes themselves ----

BEGINS = "import os, pathlib, signal, sys, time; number = int(os.environ['RANK'])"
# Once all are there.
STARTED = """pathlib.Path(str(number)).write_text(str(os.getpid()))
while not all(pathlib.Path(each).exists() for each in '01'): time.sleep(0.01)"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run a worker of two such scripts, and no master; returns its exit code. Nothing of them is left."""

    def run_one(script, waits=None):
        command = (sys.executable, "-c", f"{BEGINS}\n{STARTED}\n{script}")
        spec = JobSpec(command=command, processes_per_worker=2, start_method="spawn")
        path = tmp_path / "job.json"
        path.write_text(spec.to_json())
        environment = WorkerEnvironment("127.0.0.1:1", Token("secret"), 3, str(path))
        for name, value in {**environment.to_env(), STACKS: "stacks"}.items():
            monkeypatch.setenv(name, value)
        code = main(waits)
        pids = [int((tmp_path / each).read_text()) for each in "01"]
        assert not any(map(psutil.pid_exists, pids))
        return code

    monkeypatch.chdir(tmp_path)
    return run_one


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("", 0),
        ("sys.exit(3) if number == 0 else time.sleep(60)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if number else time.sleep(60)", 137),
    ],
)
def test_the_first_that_fails_ends_the_others_and_its_exit_code_is_the_workers(run, script, code):
    assert run(script) == code


def test_where_one_goes_on_without_the_others_the_worker_has_failed(run, capfd):
    assert run("time.sleep(60) if number else None", Waits(unsaid=0.2)) == 2
    assert "processes [1] of this worker go on, where another's script has ended" in capfd.readouterr().err


def test_all_are_told_of_sigterm(run):
    """Here the second to be ready tells the worker."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); pathlib.Path('h' + str(number)).touch()"
    tells = "os.path.exists('h0') and os.path.exists('h1') and os.kill(os.getppid(), signal.SIGTERM)"
    assert run(f"{handler}\nwhile True:\n  time.sleep(0.05)\n  {tells}") == 0


def test_one_that_is_being_started_when_sigterm_comes_is_told_as_well(run, monkeypatch):
    spawn = Spawner.spawn

    async def told_meanwhile(*asked):
        made = await spawn(*asked)
        if asked[1]["RANK"] == "1":
            await asyncio.to_thread(wait_until, lambda: os.path.exists("h0") and os.path.exists("h1"))
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.1)
        return made

    monkeypatch.setattr(Spawner, "spawn", told_meanwhile)
    handler = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); pathlib.Path('h' + str(number)).touch()"
    assert run(f"{handler}\ntime.sleep(60)", Waits(alone=10.0)) == 0


def test_each_has_a_number_and_a_session_of_its_own(run, tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", PROCESS, STACKS)
    asked = [*names, PROCESSES, TOKEN]
    assert run(f"print(*map(os.environ.get, {asked}), file=open('e' + str(number), 'w'))") == 0
    (*first, ours, mine), (*second, others, its) = ((tmp_path / each).read_text().split() for each in ("e0", "e1"))
    assert first == ["0", "0", "2", "2", "127.0.0.1", "0", "stacks"]
    assert second == ["1", "1", "2", "2", "127.0.0.1", "1", "stacks.1"]
    assert ours == others
    assert len({mine, its, "secret"}) == 3
