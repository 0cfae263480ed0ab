"""The store that Gloo asks for its peers: what it keeps, and whom it serves."""

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading

import pytest

from elasticdl.elastic.link import store as store_module
from elasticdl.elastic.link.store import KvServer, KvStore, Refusal

NOBODY = 65534
PUT_AND_PRINT = """
import encodings.idna, http.client, os, sys
os.setuid(int(sys.argv[2]))  # only now: the interpreter may be where another user can't read
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=10)
try:
    connection.request("PUT", "/global/0", b"mine")
    print(connection.getresponse().status)
except (http.client.HTTPException, OSError) as error:
    print(type(error).__name__)
"""


def test_what_comes_before_its_world_holds_for_it_and_a_late_entry_is_dropped():
    store = KvStore(lambda *_: None)
    store.open_world(1)
    store.receive(2, ("global", "1"), b"early")
    store.open_world(2)
    store.receive(1, ("global", "1"), b"late")
    assert store.get(("global", "1"), timeout=0) == b"early"
    store.break_world(3)
    store.open_world(3)
    with pytest.raises(Refusal):
        store.get(("global", "1"), timeout=0)


def test_a_waiting_request_is_answered_by_what_comes():
    store = KvStore(lambda *_: None)
    store.open_world(1)
    got = []
    waiter = threading.Thread(target=lambda: got.append(store.get(("global", "1"), timeout=10)))
    waiter.start()
    store.receive(1, ("global", "1"), b"there")
    waiter.join(10)
    assert got == [b"there"]


@pytest.fixture
def server():
    store = KvStore(lambda *_: None)
    store.open_world(1)
    server = KvServer(store)
    yield server
    server.close()


def ask(server, method, path, body=None, headers=None):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)) as connection:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.read()


def test_the_store_speaks_the_http_of_horovods_client(server):
    assert ask(server, "PUT", "/global/0", b"\x00binary\xff") == (200, b"")
    assert ask(server, "GET", "/global/0") == (200, b"\x00binary\xff")
    assert ask(server, "DELETE", "/global/0") == (200, b"")
    server.store.break_world(1)
    assert ask(server, "GET", "/global/1")[0] == 410


@pytest.mark.parametrize("user", [os.geteuid(), NOBODY])
def test_another_process_is_refused_whoever_its_user_is(server, user):
    if user != os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    command = [sys.executable, "-I", "-S", "-c", PUT_AND_PRINT, str(server.port), str(user)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, cwd="/")
    assert ended.stdout.strip() in ("RemoteDisconnected", "ConnectionResetError", "BrokenPipeError")
    assert server.store.values(1) == []
    assert ask(server, "PUT", "/global/0", b"mine") == (200, b"")


def test_asking_whose_a_connection_is_leaves_nothing_open(server):
    ask(server, "PUT", "/global/0", b"x")
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        ask(server, "PUT", "/global/0", b"x")
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 2  # the last answers' sockets may be on their way


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/global", 400), ("PUT", "//0", 400), ("POST", "/global/0", 501)]
)
def test_requests_that_make_no_sense_are_refused(server, method, path, status):
    assert ask(server, method, path, b"")[0] == status
    assert server.store.values(1) == []


@pytest.mark.parametrize("closes", [True, False])
def test_half_a_request_puts_nothing_and_is_given_up(server, monkeypatch, closes):
    monkeypatch.setattr(store_module._Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf")
        if closes:
            client.shutdown(socket.SHUT_WR)
        answer = client.recv(100)
        assert answer == b"" or b" 400 " in answer
    assert server.store.values(1) == []
