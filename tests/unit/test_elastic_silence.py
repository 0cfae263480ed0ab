"""A worker says so when it does not reach its master, and why; time is made up, the connections are real."""

import contextlib
import logging
import math
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from session_kit import FakeMaster

from elasticdl.common.channel import ATTEMPT_SECONDS, FIRST_DELAY, LONGEST_DELAY, Silence, in_words
from elasticdl.common.credentials import Token, WorkerEnvironment
from elasticdl.elastic.link import stream
from elasticdl.job import messages as m
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

DEADLINE = 30.0
ENDED_SECONDS = 15.0  # gRPC by itself ends an attempt to connect after 20
LIMIT = 600.0
REFUSED = "the connection is refused, as nothing listens there"


def lines(silence, seconds):
    """What is said in the seconds up to these, by when."""
    told = ((second, silence.look(float(second))) for second in range(seconds))
    return {second: line for second, line in told if line}


def test_it_is_told_after_ten_seconds_and_ever_more_rarely():
    silence = Silence("digits:50001", LIMIT)
    assert silence.look(5.0) == ""  # it has not tried yet
    silence.begin(0.0)
    silence.fail(REFUSED)
    told = lines(silence, 600)
    assert list(told) == [10, 20, 40, 80, 160, 320]
    assert told[20].startswith(
        f"this worker has not reached the master at digits:50001 for 20 s: {REFUSED}; it goes on"
    )
    assert silence.answer(600.0) == "this worker has reached the master at digits:50001 after 600 s"
    assert silence.answer(601.0) == ""


def test_who_is_reached_in_time_is_nothing_to_be_told_of_nor_is_a_short_absence():
    silence = Silence("digits:50001", LIMIT)
    silence.begin(0.0)
    silence.fail(REFUSED)
    assert silence.answer(9.0) == ""
    assert lines(silence, 1000) == {}  # there is a conversation
    silence.end(1000.0)
    silence.fail(REFUSED)
    assert (silence.look(1009.0), silence.silence(1009.0)) == ("", 9.0)
    assert "for 10 s: the connection is refused" in silence.look(1010.0)
    assert silence.answer(1011.0) == "this worker has reached the master at digits:50001 after 11 s"


def test_attempts_come_more_slowly_until_one_succeeds():
    silence = Silence("digits:50001", LIMIT)
    delays = [silence.fail(REFUSED) for _ in range(8)]
    assert delays[0] == FIRST_DELAY
    assert delays[-1] == LONGEST_DELAY
    assert delays == sorted(delays)
    silence.answer(0.0)
    assert silence.fail(REFUSED) == FIRST_DELAY


@pytest.mark.parametrize(
    ("details", "words"),
    [  # of gRPC 1.82, and as older ones have it
        (
            "errors resolving m.ns.svc:1: [field:hostname lookup error: Domain name not found]",
            "its name can't be resolved",
        ),
        ("last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused", REFUSED),
        ("UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "the connection is closed at once"),
        ("", "no answer"),
        ("Received http2 header with status: 404", "what answers there is no master"),
        ("something\n else", "something else"),
    ],
)
def test_what_grpc_says_is_put_into_words(details, words):
    assert in_words(details) == words


def test_an_attempt_ends_when_the_worker_is_to_give_up():
    silence = Silence("digits:50001", LIMIT)
    for began in (0.0, LIMIT - 1.0):
        silence.begin(began)
    assert not silence.stalls(LIMIT)
    assert silence.stalls(LIMIT + 0.1)


def test_who_sends_heartbeats_looks_after_the_stream():
    looks = queue.SimpleQueue()

    class Master(FakeMaster):
        def look(self):
            looks.put(True)

    session = Master().session
    session.open()
    for _ in range(2):
        looks.get(timeout=DEADLINE)
    session.close()


# ---- over a real channel ----


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Listening:
    has_last_word = False

    def __init__(self):
        self.heard = queue.SimpleQueue()

    def greet(self, unsent):
        return [m.Hello()]

    def receive(self, message):
        self.heard.put(message.WhichOneof("body"))

    def lost(self, reason):
        self.heard.put(reason)

    def next(self):
        return self.heard.get(timeout=DEADLINE)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def open_stream(clock, caplog, monkeypatch):
    opened = []

    def open_one(address, limit=LIMIT):
        listening = Listening()
        environment = WorkerEnvironment(address, Token("t"), 3, "job.json", master_timeout=limit)
        opened.append(stream.MasterStream(environment, clock))
        opened[-1].open(listening)
        return listening, opened[-1]

    with caplog.at_level(logging.WARNING):
        yield open_one
    clock.now = math.inf
    for one in opened:
        one.look()
        one.close()


@pytest.fixture
def silent():
    """A server that takes connections and says nothing; its address, and those who came."""
    came, kept = queue.SimpleQueue(), []

    def take():
        with contextlib.suppress(OSError):
            while True:
                kept.append(server.accept())
                came.put(kept[-1])

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}", came
        server.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE)


def test_an_unexpected_error_ends_no_session_without_a_word(open_stream, monkeypatch, caplog):
    """A listener that can not bear what the master says."""

    class Stub:
        def __init__(self, channel): ...

        def Session(self, messages, metadata):
            next(messages)
            return iter([pb.MasterMessage()])

    def receive(self, message):
        raise KeyError("not among the members")

    monkeypatch.setattr(stream.pb_grpc, "MasterStub", Stub)
    monkeypatch.setattr(Listening, "receive", receive)
    listening, _ = open_stream("127.0.0.1:1")
    assert listening.next() == "the session with the master has failed: KeyError: 'not among the members'"
    assert "Traceback" in caplog.text


class Welcoming(pb_grpc.MasterServicer):
    def Session(self, messages, context):
        yield pb.MasterMessage(welcome=pb.Welcome(job_name="digits"))
        for _ in messages:
            pass


def look_until(opened, holds):
    """As the heartbeat's thread does."""
    deadline = time.monotonic() + ENDED_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        opened.look()
        time.sleep(0.02)


def test_a_closed_port_is_told_and_that_the_master_has_come_after_all(clock, open_stream, caplog):
    with socket.socket() as taken:  # nobody else gets it, and nobody listens
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listening, opened = open_stream(address)
        opened.look()
        assert caplog.messages == []
        look_until(opened, lambda: opened._silence._problem == REFUSED)
        clock.now = 10.0
        opened.look()
        assert f"has not reached the master at {address} for 10 s: {REFUSED}; " in caplog.messages[0]
        clock.now = 19.0
        server = grpc.server(ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 1),))
        pb_grpc.add_MasterServicer_to_server(Welcoming(), server)
        assert server.add_insecure_port(address)
        server.start()
    assert listening.next() == "welcome"
    look_until(opened, lambda: caplog.messages[1:])
    assert caplog.messages[1] == f"this worker has reached the master at {address} after 19 s"
    server.stop(None).wait(DEADLINE)


def test_silence_is_told_and_such_an_attempt_is_ended_for_another(clock, silent, open_stream, caplog):
    address, came = silent
    _, opened = open_stream(address)
    came.get(timeout=DEADLINE)
    clock.now = 10.0
    opened.look()
    (line,) = caplog.messages
    assert f"{address} for 10 s: no answer; it goes on trying" in line
    assert came.empty()
    clock.now = ATTEMPT_SECONDS + 1.0
    look_until(opened, lambda: not came.empty())


def test_after_its_time_it_gives_up_and_says_why(clock, silent, open_stream):
    address, came = silent
    listening, opened = open_stream(address, limit=30.0)
    came.get(timeout=DEADLINE)
    clock.now = ATTEMPT_SECONDS + 1.0
    look_until(opened, lambda: not listening.heard.empty())
    assert listening.next() == f"no master at {address} for 31 s: no answer"
