"""A worker of several processes: what they say as one, their sessions, and how they end."""

import asyncio
import os
import sys
from contextlib import asynccontextmanager
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
from elasticdl.places import worker_group
from elasticdl.places.worker_group import MASTER, Bundle, Relay, main
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


@pytest.mark.parametrize("story", told_in(BUNDLE))
def test_what_processes_say_as_one(story):
    title, *lines = story
    bundle = Bundle(int(settings_of(title).get("processes", 2)))
    for line in lines:
        told = []
        for part in parts_of(line.partition("->")[0]):
            who, _, text = part.partition(": ")
            if who == "master":
                said = bundle.of_master(text_format.Parse(text, pb.MasterMessage()))
            else:
                said = bundle.of_process(int(who), text_format.Parse(text, pb.WorkerMessage()))
            for whom, message in said:
                text = text_format.MessageToString(message, as_one_line=True)
                told.append(f"{'master' if whom == MASTER else whom}: {text}")
        check(line, told)


@pytest.mark.parametrize(("worlds", "world"), [((4, 4), 4), ((4, 5), 0), ((0, 4), 0)])
def test_a_worker_whose_processes_are_in_different_worlds_is_in_none(worlds, world):
    hello = Bundle(2).hello([pb.Hello(worker_id=3, host="h", world_version=each, pid=1) for each in worlds]).hello
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
        relay = Relay(WorkerEnvironment(f"127.0.0.1:{master.port}", OF_MASTER, 3, "job.json"), 2)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        pb_grpc.add_MasterServicer_to_server(relay, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        keeping = asyncio.ensure_future(relay.keep())

        def said():
            return [each.said for each in master.events if isinstance(each, FromWorker)]

        async def has(condition):
            await asyncio.to_thread(wait_until, condition, lambda: master.events, DEADLINE / 3)

        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

            async def come(number, *more):
                process = Process(channel, relay.tokens[number])
                await process.say(HELLO, *more)
                return process

            yield SimpleNamespace(master=master, relay=relay, channel=channel, come=come, said=said, has=has)
        keeping.cancel()
        await asyncio.wait({keeping})
        await server.stop(0)


HELLO = pb.Hello(worker_id=3, host="127.0.0.1", pid=1)
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def bodies(said):
    return [type(each).__name__ for each in said]


@on(relayed)
async def test_who_is_none_of_the_processes_is_refused(worker):
    for token, first in ((OF_MASTER.value, HELLO), ("", HELLO), (worker.relay.tokens[0], pb.Ask())):
        stranger = Process(worker.channel, token)
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
async def test_the_failure_that_came_first_is_told_when_it_is_time(worker):
    first, second = await worker.come(0), await worker.come(1)
    assert [await first.hears(), await second.hears()] == ["welcome", "welcome"]
    await second.say(pb.Failed(message="no memory"))
    await asyncio.wait_for(worker.relay.has_failed.wait(), DEADLINE)
    await first.say(pb.Failed(message="another is gone"), pb.Progress(total_steps=9))
    await worker.has(lambda: len(worker.said()) > 1)
    assert bodies(worker.said()) == ["Hello", "Progress"]
    worker.relay.tell_failure()
    assert [await first.hears(), await second.hears()] == ["last_word_taken"] * 2
    assert worker.said()[2] == m.Failed(False, "process 1 of the worker: no memory")


@on(relayed)
async def test_who_has_failed_ends_when_the_master_has_taken_that_and_the_others_are_killed(worker):
    killed = []
    worker.relay.kill_others = killed.append
    first, second = await worker.come(0), await worker.come(1)
    assert [await first.hears(), await second.hears()] == ["welcome", "welcome"]
    await second.say(pb.Failed(message="no memory"))
    await second.call.done_writing()
    await asyncio.wait_for(worker.relay.has_failed.wait(), DEADLINE)
    await asyncio.sleep(0.1)
    assert killed == [], "the master may not be there, and the others are needed for the next session with it"
    worker.relay.tell_failure()
    heard = [[await each.hears() for _ in range(2)] for each in (second, first)]
    assert heard == [["last_word_taken", grpc.StatusCode.OK], ["last_word_taken", UNAVAILABLE]]
    assert killed == [1]


@on(relayed)
async def test_if_all_have_failed_it_is_the_first_that_ends_by_itself(worker):
    killed = []
    worker.relay.kill_others = killed.append
    first, second = await worker.come(0), await worker.come(1)
    assert [await first.hears(), await second.hears()] == ["welcome", "welcome"]
    await second.say(pb.Failed(message="no memory"))
    await asyncio.wait_for(worker.relay.has_failed.wait(), DEADLINE)
    await first.say(pb.Failed(message="another is gone"))
    for process in (first, second):
        await process.call.done_writing()
    await asyncio.sleep(0.1)
    worker.relay.tell_failure()
    for process in (first, second):
        assert [await process.hears(), await process.hears()] == ["last_word_taken", grpc.StatusCode.OK]
    assert killed == [1]


@on(relayed)
async def test_a_failure_that_a_lost_master_was_told_is_told_the_next(worker):
    first, second = await worker.come(0), await worker.come(1)
    assert [await first.hears(), await second.hears()] == ["welcome", "welcome"]
    await second.say(pb.Failed(message="no memory"))
    await asyncio.wait_for(worker.relay.has_failed.wait(), DEADLINE)
    first.call.cancel()
    assert await second.hears() is UNAVAILABLE
    worker.relay.tell_failure()
    first, second = await worker.come(0), await worker.come(1, pb.Failed(message="no memory"))
    for process in (first, second):
        assert [await process.hears(), await process.hears()] == ["welcome", "last_word_taken"]


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

    def run_one(script):
        command = (sys.executable, "-c", f"{BEGINS}\n{STARTED}\n{script}")
        spec = JobSpec(command=command, processes_per_worker=2, start_method="spawn")
        path = tmp_path / "job.json"
        path.write_text(spec.to_json())
        environment = WorkerEnvironment("127.0.0.1:1", Token("secret"), 3, str(path))
        for name, value in {**environment.to_env(), STACKS: "stacks"}.items():
            monkeypatch.setenv(name, value)
        code = main()
        pids = [int((tmp_path / each).read_text()) for each in "01"]
        assert not any(map(psutil.pid_exists, pids))
        return code

    monkeypatch.chdir(tmp_path)
    return run_one


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("", 0),
        ("sys.exit(3 if number else 0)", 3),
        ("sys.exit(3) if number == 0 else time.sleep(60)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if number else time.sleep(60)", 137),
    ],
)
def test_the_first_that_fails_ends_the_others_and_its_exit_code_is_the_workers(run, script, code):
    assert run(script) == code


def test_where_one_goes_on_without_the_others_the_worker_has_failed(run, monkeypatch, capfd):
    monkeypatch.setattr(worker_group, "ALONE_SECONDS", 0.2)
    assert run("time.sleep(60) if number else None") == 1
    assert "elasticdl: processes [1] of this worker go on, where another's script has ended" in capfd.readouterr().err


def test_all_are_told_of_sigterm(run):
    """Here the second to be ready tells the worker."""
    handler = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); pathlib.Path('h' + str(number)).touch()"
    tells = "os.path.exists('h0') and os.path.exists('h1') and os.kill(os.getppid(), signal.SIGTERM)"
    assert run(f"{handler}\nwhile True:\n  time.sleep(0.05)\n  {tells}") == 0


def test_each_has_a_number_and_a_session_of_its_own(run, tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", PROCESS, STACKS)
    asked = [*names, PROCESSES, TOKEN]
    assert run(f"print(*map(os.environ.get, {asked}), file=open('e' + str(number), 'w'))") == 0
    (*first, ours, mine), (*second, others, its) = ((tmp_path / each).read_text().split() for each in ("e0", "e1"))
    assert first == ["0", "0", "2", "2", "127.0.0.1", "0", "stacks"]
    assert second == ["1", "1", "2", "2", "127.0.0.1", "1", "stacks.1"]
    assert ours == others
    assert len({mine, its, "secret"}) == 3
