"""Replicas and what balances requests over them: real HTTP on the loopback interface, without a model."""

from __future__ import annotations

import asyncio
import functools
from contextlib import asynccontextmanager
from itertools import count

from benchmarks.experiments.serving import frontend as requests
from benchmarks.experiments.serving.frontend import Frontend, Rotation, new_session
from benchmarks.experiments.serving.server import PIXELS, Replica

IMAGE = bytes(PIXELS)
HOSTS = [f"127.0.0.{number}" for number in range(11, 15)]


@asynccontextmanager
async def serving(classify, host, port, linger=0.0):
    """A replica; leaving the context tells it to leave, and waits for its end."""
    replica = Replica(classify, 0.0)
    task = asyncio.create_task(replica.serve(host, port, linger))
    try:
        yield replica
    finally:
        replica.leaving.set()
        async with asyncio.timeout(10):
            await task


@asynccontextmanager
async def frontend(port, *hosts):
    """With these in rotation, whoever of them answers."""
    async with new_session() as session:
        front = Frontend(session, port)
        front.rotation.become({host: host for host in hosts})
        yield front


async def free_port() -> int:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        return server.sockets[0].getsockname()[1]


def story(told):
    @functools.wraps(told)
    def test(**fixtures):
        asyncio.run(asyncio.wait_for(told(**fixtures), 20))

    return test


def test_a_replica_gets_requests_once_it_is_healthy_until_it_is_to_go():
    rotation = Rotation()
    assert rotation.become({"a": "1", "b": "2"}) == ["1", "2"]
    assert rotation.take() is None
    rotation.admit("1")
    assert rotation.take() == "1"
    assert rotation.become({"b": "2"}) == ["2"]
    assert rotation.take() is None
    rotation.give_back("1")  # it finished after it was gone
    rotation.admit("1")
    assert rotation.size == 0


def test_the_replica_with_the_fewest_requests_gets_the_next_and_equals_take_turns():
    rotation = Rotation()
    for address in rotation.become({name: name for name in "abc"}):
        rotation.admit(address)
    assert [rotation.take() for _ in range(4)] == ["a", "b", "c", "a"]
    rotation.give_back("b")
    assert rotation.take() == "b"
    rotation.give_back("a")
    rotation.give_back("a")
    assert rotation.take(without=frozenset("a")) == "c"


@story
async def test_a_refused_request_goes_to_another_replica_and_is_counted():
    port = await free_port()
    async with serving(lambda image: 1, HOSTS[1], port), frontend(port, *HOSTS[:2]) as front:
        assert await front.admit_when_healthy(HOSTS[1])
        front.rotation.admit(HOSTS[0])  # where nobody listens
        assert await front.send(IMAGE) == requests.Reply(HOSTS[1], 1, 1, "")


@story
async def test_a_request_that_was_taken_is_not_sent_again():
    taken = count()

    async def drop(reader, writer):
        next(taken)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    port = await free_port()
    server = await asyncio.start_server(drop, HOSTS[0], port)
    async with server, serving(lambda image: 1, HOSTS[1], port), frontend(port, *HOSTS[:2]) as front:
        for host in HOSTS[:2]:
            front.rotation.admit(host)
        reply = await front.send(IMAGE)
        assert (reply.replica, reply.refused, reply.answer) == (HOSTS[0], 0, None)
        assert reply.failure.startswith(("Server", "Client"))
        assert next(taken) == 1
