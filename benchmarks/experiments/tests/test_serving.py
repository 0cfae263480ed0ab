"""Experiment 2: how many requests come, how many replicas that takes, and what balances requests over them.

Replicas are real HTTP on the loopback interface, without a model.
"""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client

from benchmarks.experiments.serving.demand import HEADROOM, PUBLISHED, Autoscaler, LoadPlan, Rule, parse_curve, scalings
from benchmarks.experiments.serving.server import PIXELS, Replica
from benchmarks.experiments.serving.service import Records, Service
from benchmarks.processes import free_port

RULE = Rule(per_replica=4.0, least=1, most=7, patience=3)
IMAGE = bytes(PIXELS)
HOSTS = [f"127.0.0.{number}" for number in range(11, 15)]


def looks(replicas: int, *rates: float) -> list[int]:
    """The replicas after each look."""
    autoscaler, found = Autoscaler(RULE, replicas), []
    for rate in rates:
        autoscaler = autoscaler.look(rate)
        found.append(autoscaler.replicas)
    return found


def test_the_rate_follows_the_curve_with_a_ramp_between_its_levels():
    curve = parse_curve("0:2,60:4,100", scale=2.0, ramp=10.0)
    assert curve.end == 50
    rates = {0: 2, 29.9: 2, 32.5: 3, 35: 4, 49: 4}
    assert [curve.rate(time, 10) for time in rates] == pytest.approx(
        [(each - HEADROOM) * 10 for each in rates.values()]
    )


@pytest.mark.parametrize("text", ["", "0:2", "10:2,20", "0:2,5:3,5:2,9", "0:0,9", "0:2,x:3,9", "0:2,5:3:4,9"])
def test_what_is_no_curve_is_refused(text):
    with pytest.raises(ValueError, match=r"expected|must begin|at least one"):
        parse_curve(text, 1.0, 1.0)


def test_the_published_curve_has_the_published_replicas():
    plan = LoadPlan(parse_curve(PUBLISHED, 1.0, 5.0), every=5.0, window=10.0, seed=1)
    reached = [(each.time, each.replicas) for each in scalings(plan, Autoscaler(RULE, 2))]
    assert [replicas for _, replicas in reached] == [3, 6, 7, 6, 5, 3, 2]
    assert reached[-1][0] < 460


@pytest.mark.parametrize(
    ("replicas", "rates", "found"),
    [
        pytest.param(2, [25.0], [7], id="up at once"),
        pytest.param(2, [100.0], [7], id="no more than the most"),
        pytest.param(5, [4.0, 11.0, 8.0, 8.0], [5, 5, 3, 3], id="down after a while, and only as far"),
        pytest.param(5, [4.0, 4.0, 19.0, 4.0, 4.0, 4.0], [5, 5, 5, 5, 5, 1], id="a lull in between"),
        pytest.param(5, [21.9, 18.1, 22.1], [5, 5, 6], id="near what the replicas are for"),
    ],
)
def test_the_autoscaler_looks_at_rates(replicas, rates, found):
    assert looks(replicas, *rates) == found


@given(st.integers(1, 7), st.lists(st.floats(0, 60), max_size=30), st.floats(0, 60))
def test_whatever_was_before_a_steady_rate_gets_what_it_needs(replicas, before, rate):
    found = looks(replicas, *before, *[rate] * 8)
    assert all(1 <= each <= 7 for each in found)
    assert found[-5] == found[-1]
    assert found[-1] * 4.0 * 1.1 >= min(rate, 28.0) - 1e-9, "enough"
    assert (found[-1] - 1) * 4.0 < max(rate / 0.9, 4.0) + 1e-9, "and no more"


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
