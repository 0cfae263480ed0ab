"""The store that Gloo asks for its peers: what it keeps, whom it serves, and that breaking a world shuts its own connections alone."""

import contextlib
import http.client
import os
import socket
import struct
import subprocess
import sys

import pytest

from elasticdl.elastic.link.store import KvServer, KvStore, Refusal, shut_published

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


@pytest.fixture
def server():
    store = KvStore(lambda *_: None)
    store.open_world(1)
    server = KvServer(store)
    yield server
    server.close()


@pytest.mark.parametrize("user", [os.geteuid(), NOBODY])
def test_another_process_is_refused_whoever_its_user_is(server, user):
    if user != os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    command = [sys.executable, "-I", "-S", "-c", PUT_AND_PRINT, str(server.port), str(user)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True, cwd="/")
    assert ended.stdout.strip() in ("RemoteDisconnected", "ConnectionResetError", "BrokenPipeError")
    assert server.store.values(1) == []
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)) as connection:
        connection.request("PUT", "/global/0", b"mine")
        assert connection.getresponse().status == 200


def test_half_a_request_puts_nothing(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"PUT /global/0 HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf")
        client.shutdown(socket.SHUT_WR)
        assert b" 400 " in client.recv(100)
    assert server.store.values(1) == []


# -- breaking a world --


def as_gloo_publishes(listener, number):
    """A ``sockaddr_storage`` and a number, as in Gloo's addresses. The number may be that of a family of addresses."""
    host, port, *_ = listener.getsockname()
    flow = bytes(4) if listener.family == socket.AF_INET6 else b""
    address = struct.pack("=H", listener.family) + struct.pack("!H", port) + flow
    return (address + socket.inet_pton(listener.family, host)).ljust(128, b"\0") + struct.pack("=q", number)


def connect(listener):
    client = socket.create_connection(listener.getsockname()[:2], timeout=10)
    peer, _ = listener.accept()
    peer.settimeout(10)
    return client, peer


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_shutting_wakes_who_waits_and_spares_other_connections_whatever_numbers_are_published(family, host):
    try:
        published, others = (socket.create_server((host, 0), family=family) for _ in range(2))
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with published, others:
        published.settimeout(10)
        (a, b), (c, d) = connect(published), connect(others)
        with a, b, c, d:
            numbered = b"".join(as_gloo_publishes(published, number) for number in range(16))
            assert shut_published([b"before", numbered, bytes(32)], listening=True) == 3
            assert (a.recv(1), b.recv(1)) == (b"", b"")
            with pytest.raises(OSError, match="Invalid argument"):  # not a timeout: nobody will ever come
                published.accept()
            c.sendall(b"x")
            assert d.recv(1) == b"x"
