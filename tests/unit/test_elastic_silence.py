"""A worker says so when it does not reach its master, and why; time is made up, the connections are real."""

import logging
import math
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest
from session_kit import Listening

from elasticdl.common.channel import ATTEMPT_SECONDS, Silence, in_words
from elasticdl.common.credentials import Token, WorkerEnvironment
from elasticdl.elastic.link import stream
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc
from tests.waiting import wait_until

DEADLINE = 30.0
ENDED_SECONDS = 15.0  # gRPC by itself ends an attempt to connect after 20
LIMIT = 600.0
REFUSED = "the connection is refused, as nothing listens there"


def test_it_is_told_after_ten_seconds_and_ever_more_rarely():
    silence = Silence("digits:50001", LIMIT)
    assert silence.look(5.0) == ""  # it has not tried yet
    silence.begin(0.0)
    silence.fail(REFUSED)
    told = {second: line for second in range(600) if (line := silence.look(float(second)))}
    assert list(told) == [10, 20, 40, 80, 160, 320]
    assert told[20].startswith(f"this worker has not reached the master at digits:50001 for 20 s: {REFUSED}; it goes")
    assert silence.answer(600.0) == "this worker has reached the master at digits:50001 after 600 s"
    assert not any(silence.look(float(second)) for second in range(601, 1000)), "there is a conversation"
    silence.end(1000.0)
    silence.fail(REFUSED)
    assert (silence.look(1009.0), silence.silence(1009.0), silence.answer(1009.0)) == ("", 9.0, "")


@pytest.mark.parametrize(
    ("details", "words"),
    [  # of gRPC 1.82, and as older ones have it
        ("errors resolving m.ns.svc:1: [field:hostname lookup error: Domain name not found]", "its name can't be resolved"),
        ("last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused", REFUSED),
        ("UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "the connection is closed at once"),
        ("", "no answer"),
        ("Received http2 header with status: 404", "what answers there is no master"),
        ("something\n else", "something else"),
    ],
)  # fmt: skip
def test_what_grpc_says_is_put_into_words(details, words):
    assert in_words(details) == words


# ---- over a real channel ----


@pytest.fixture
def clock():
    return SimpleNamespace(now=0.0)


@pytest.fixture
def open_stream(clock, caplog):
    opened = []

    def open_one(address, limit=LIMIT, **listens):
        listening = Listening()
        vars(listening).update(listens)
        environment = WorkerEnvironment(address, Token("t"), 3, "job.json", master_timeout=limit)
        opened.append(stream.MasterStream(environment, lambda: clock.now))
        opened[-1].open(listening)
        return listening, opened[-1]

    with caplog.at_level(logging.WARNING):
        yield open_one
    clock.now = math.inf
    for one in opened:
        one.look()
        one.close()


class Welcoming(pb_grpc.MasterServicer):
    def Session(self, messages, context):
        yield pb.MasterMessage(welcome=pb.Welcome(job_name="digits"))
        for _ in messages:
            pass


def look_until(opened, holds):
    """As the heartbeat's thread does."""
    wait_until(lambda: opened.look() or holds(), seconds=ENDED_SECONDS)


def test_a_closed_port_is_told_and_that_the_master_has_come_after_all_and_what_a_listener_can_not_bear(
    clock, open_stream, caplog
):
    def receive(message):
        raise KeyError("not among the members")

    with socket.socket() as taken:  # nobody else gets it, and nobody listens
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listening, opened = open_stream(address)
        look_until(opened, lambda: opened._silence._problem == REFUSED)
        assert caplog.messages == []
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
    another, _ = open_stream(address, receive=receive)
    assert another.next() == "the session with the master has failed: KeyError: 'not among the members'"
    server.stop(None).wait(DEADLINE)


@pytest.mark.parametrize("limit", [LIMIT, 30.0])
def test_an_attempt_that_is_met_with_silence_is_ended_for_another_or_for_good(clock, open_stream, caplog, limit):
    with socket.create_server(("127.0.0.1", 0)) as server:  # it takes connections and says nothing
        server.settimeout(DEADLINE)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        listening, opened = open_stream(address, limit)
        with server.accept()[0]:
            clock.now = 10.0
            opened.look()
            assert f"{address} for 10 s: no answer; it goes on trying" in caplog.messages[0]
            clock.now = ATTEMPT_SECONDS + 1.0
            look_until(opened, lambda: not listening.heard.empty() or select.select([server], [], [], 0)[0])
        if limit == LIMIT:
            assert listening.heard.empty()
        else:
            assert listening.next() == f"no master at {address} for 31 s: no answer"
