"""Replicas and what balances requests over them: real HTTP on the loopback interface, without a model."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager
from itertools import count

from benchmarks.experiments.serving import frontend as requests
from benchmarks.experiments.serving.demand import Autoscaler, LoadPlan, Rule, parse_curve, scalings
from benchmarks.experiments.serving.frontend import Frontend, Rotation, new_session, ready_addresses
from benchmarks.experiments.serving.server import PIXELS, Replica
from benchmarks.experiments.serving.service import Images, Load, Records

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


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


def pod(phase="Running", ready="True", app="serving", **metadata) -> dict:
    conditions = [{"type": "Ready", "status": ready}]
    return {
        "metadata": {"name": "p", "labels": {"app": app}, **metadata},
        "status": {"phase": phase, "podIP": "10.0.0.1", "conditions": conditions},
    }


def test_only_pods_that_are_ready_and_not_to_go_are_chosen():
    pods = {
        "good": pod(),
        "unready": pod(ready="False"),
        "leaving": pod(deletionTimestamp="2026-01-01T00:00:00Z"),
        "other": pod(app="other"),
        "new": {"metadata": {"name": "new", "labels": {"app": "serving"}}},
    }
    assert ready_addresses(pods, "serving") == {"good": "10.0.0.1"}


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


def test_a_replica_answers_and_refuses_what_is_no_image():
    async def work():
        port = await free_port()
        async with serving(lambda image: image[0], HOSTS[0], port), frontend(port, HOSTS[0]) as front:
            assert await front.admit_when_healthy(HOSTS[0])
            assert await front.send(b"\x07" + IMAGE[1:]) == requests.Reply(HOSTS[0], 0, 7, "")
            assert "5 bytes: an image has 3072" in (await front.send(b"12345")).failure

    run(work())


def test_a_replica_that_leaves_is_unhealthy_finishes_what_is_under_way_and_takes_no_more():
    began, go_on = threading.Event(), threading.Event()

    def classify(image: bytes) -> int:
        began.set()
        assert go_on.wait(10)
        return 1

    async def work():
        port = await free_port()
        async with frontend(port, HOSTS[0]) as front, serving(classify, HOSTS[0], port) as replica:
            assert await front.admit_when_healthy(HOSTS[0])
            under_way = asyncio.create_task(front.send(IMAGE))
            await asyncio.to_thread(began.wait, 10)
            replica.leaving.set()
            await until_closed(HOSTS[0], port)
            assert not under_way.done()
            go_on.set()
            assert (await under_way).answer == 1

    run(work())


async def until_closed(host, port) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            return
        writer.close()
        await asyncio.sleep(0.01)


def test_while_it_lingers_a_replica_is_unhealthy_and_serves():
    async def work():
        port = await free_port()
        leaving = serving(lambda image: 1, HOSTS[0], port, linger=0.5)
        async with frontend(port, HOSTS[0]) as front, leaving as replica, new_session() as session:
            assert await front.admit_when_healthy(HOSTS[0])
            replica.leaving.set()
            async with session.get(f"http://{HOSTS[0]}:{port}/health") as response:
                assert response.status == 503
            assert (await front.send(IMAGE)).answer == 1

    run(work())


def test_a_refused_request_goes_to_another_replica_and_is_counted():
    async def work():
        port = await free_port()
        async with serving(lambda image: 1, HOSTS[1], port), frontend(port, *HOSTS[:2]) as front:
            assert await front.admit_when_healthy(HOSTS[1])
            front.rotation.admit(HOSTS[0])  # where nobody listens
            assert await front.send(IMAGE) == requests.Reply(HOSTS[1], 1, 1, "")

    run(work())


def test_a_request_that_all_have_refused_is_tried_again_until_it_is_too_late(monkeypatch):
    monkeypatch.setattr(requests, "LOOK_SECONDS", 0.01)

    async def work():
        port = await free_port()
        async with frontend(port, HOSTS[0]) as front:
            front.rotation.admit(HOSTS[0])
            waiting = asyncio.create_task(front.send(IMAGE))
            await asyncio.sleep(0.05)
            async with serving(lambda image: 1, HOSTS[0], port):
                reply = await waiting
            assert reply.answer == 1
            assert reply.refused > 1
            monkeypatch.setattr(requests, "ANSWER_SECONDS", 0.05)
            assert (await front.send(IMAGE)).failure == f"no answer within 0.05 s from {HOSTS[0]}"

    run(work())


def test_a_request_that_was_taken_is_not_sent_again():
    taken = count()

    async def drop(reader, writer):
        next(taken)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def work():
        port = await free_port()
        server = await asyncio.start_server(drop, HOSTS[0], port)
        async with server, serving(lambda image: 1, HOSTS[1], port), frontend(port, *HOSTS[:2]) as front:
            for host in HOSTS[:2]:
                front.rotation.admit(host)
            reply = await front.send(IMAGE)
            assert (reply.replica, reply.refused, reply.answer) == (HOSTS[0], 0, None)
            assert reply.failure.startswith(("Server", "Client"))
            assert next(taken) == 1

    run(work())


def test_a_request_without_a_replica_waits_for_one_but_not_for_ever(monkeypatch):
    async def work():
        port = await free_port()
        async with frontend(port, HOSTS[0]) as front:
            waiting = asyncio.create_task(front.send(IMAGE))
            look = asyncio.create_task(front.admit_when_healthy(HOSTS[0]))
            async with serving(lambda image: 1, HOSTS[0], port):
                assert (await waiting).answer == 1
                assert await look
            front.rotation.become({})
            monkeypatch.setattr(requests, "ANSWER_SECONDS", 0.05)
            assert (await front.send(IMAGE)).failure == "no answer within 0.05 s as no replica was in rotation"

    run(work())


def test_the_same_image_must_get_the_same_class():
    images = Images(seed=1)
    number, _ = images.draw()
    assert images.objection(number, 3) == images.objection(number, 3) == images.objection(number, None) == ""
    assert images.objection(number, 4) == "class 4, where the first answer was 3"


def test_a_load_is_sent_and_scaled_for_and_written_down(tmp_path):
    plan = LoadPlan(parse_curve("0:1,1:2,2", scale=1.0, ramp=0.0), every=0.25, window=0.5, seed=2)
    scaled: list[int] = []

    async def work():
        port, loop = await free_port(), asyncio.get_running_loop()
        began = loop.time()
        autoscaler = Autoscaler(Rule(40.0, 1, 3, 2), 1)
        load = Load(plan, autoscaler, scaled.append, lambda: loop.time() - began)
        with Records(tmp_path) as records:
            async with serving(lambda image: image[0] % 10, HOSTS[0], port), frontend(port, HOSTS[0]) as front:
                front.rotation.admit(HOSTS[0])
                await load.play(front, records)
            assert [each.failure for each in records.requests] == [""] * len(records.requests)
            assert [each.replicas for each in records.scalings] == scaled
            assert records.scalings == list(scalings(plan, autoscaler))
            assert 2 in scaled
        rows = (tmp_path / "requests.csv").read_text().splitlines()
        assert len(rows) == len(records.requests) + 1 > 60
        assert rows[1].split(",")[2:4] == [HOSTS[0], "0"]

    run(work())
