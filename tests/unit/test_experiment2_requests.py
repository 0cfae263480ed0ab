"""Replicas and what balances requests over them: real HTTP on the loopback interface, without a model."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest
from kubernetes import client

from benchmarks.experiments.serving.server import PIXELS, Replica
from benchmarks.experiments.serving.service import Records, Service
from benchmarks.processes import free_port

IMAGE = bytes(PIXELS)
HOSTS = [f"127.0.0.{number}" for number in range(11, 15)]


@contextmanager
def serving(host, port):
    """A replica; leaving the context tells it to leave, and waits for its end."""
    replica = Replica((host, port), lambda image: 1, 0.0)
    thread = threading.Thread(target=replica.serve, args=(0.0,))
    thread.start()
    yield replica
    replica.leaving.set()
    thread.join(10)
    assert not thread.is_alive()


def service(port):
    core = client.CoreV1Api(client.ApiClient(client.Configuration(host="https://nobody.invalid")))
    return Service(core, "n", "serving", port, Records())


@pytest.fixture
def balanced(monkeypatch):
    """The health of no replica is looked at."""
    monkeypatch.setattr(Service, "_admit", lambda self, address: None)
    return service(free_port())


def test_a_replica_gets_requests_once_it_is_healthy_until_it_is_to_go(balanced):
    balanced.become({"1", "2"})
    assert balanced.take((), 0) == ""
    balanced.admit("1")
    assert balanced.take((), 0) == "1"
    balanced.become({"2"})
    assert balanced.take((), 0) == ""
    balanced.give_back("1")  # it finished after it was gone
    balanced.admit("1")
    assert balanced.take((), 0) == ""
    assert [each.gpus for each in balanced._records.rotations] == [1, 0]


def test_the_replica_with_the_fewest_requests_gets_the_next_and_equals_take_turns(balanced):
    balanced.become(set("abc"))
    for address in "cba":
        balanced.admit(address)
    assert [balanced.take((), 0) for _ in range(4)] == ["a", "b", "c", "a"]
    balanced.give_back("b")
    assert balanced.take((), 0) == "b"
    balanced.give_back("a")
    balanced.give_back("a")
    assert balanced.take(("a",), 0) == "c"


def test_a_refused_request_goes_to_another_replica_and_is_counted(balanced):
    with serving(HOSTS[1], balanced._port):
        balanced.become(set(HOSTS[:2]))
        balanced.admit(HOSTS[1])
        balanced.admit(HOSTS[0])  # where nobody listens
        assert balanced.send(IMAGE) == (HOSTS[1], 1, 1, "")


def test_a_replica_that_is_ready_comes_into_rotation_when_it_answers():
    port = free_port()
    front = service(port)
    front.become({HOSTS[0]})
    with serving(HOSTS[0], port) as replica:
        front.wait_for_replicas(1, 10, lambda: None)
        assert front.send(IMAGE) == (HOSTS[0], 0, 1, "")
        assert front.send(IMAGE[1:])[2:] == (None, "400 b'\"3071 bytes: an image has 3072\"'")
        replica.leaving.set()
        front.become(set())


def test_a_request_that_was_taken_is_not_sent_again(balanced):
    taken = []

    def drop(server):
        connection, _ = server.accept()
        taken.append(connection.recv(100))
        connection.close()

    with socket.create_server((HOSTS[0], balanced._port)) as server, serving(HOSTS[1], balanced._port):
        threading.Thread(target=drop, args=(server,)).start()
        balanced.become(set(HOSTS[:2]))
        balanced.admit(HOSTS[1])
        balanced.admit(HOSTS[0])
        replica, refused, answer, failure = balanced.send(IMAGE)
    assert (replica, refused, answer) == (HOSTS[0], 0, None)
    assert failure.startswith(("RemoteDisconnected", "ConnectionReset", "BrokenPipe"))
    assert len(taken) == 1
