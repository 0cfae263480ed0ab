"""Breaking a world shuts its own connections, and no others of the process."""

import socket
import struct

import pytest

from elasticdl.elastic.link.store import shut_published

FAMILIES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


def as_gloo_publishes(listener, number=-1):
    """A ``sockaddr_storage`` and a number, as in Gloo's addresses."""
    host, port, *_ = listener.getsockname()
    flow = bytes(4) if listener.family == socket.AF_INET6 else b""
    address = struct.pack("=H", listener.family) + struct.pack("!H", port) + flow
    return (address + socket.inet_pton(listener.family, host)).ljust(128, b"\0") + struct.pack("=q", number)


def connect(listener):
    client = socket.create_connection(listener.getsockname()[:2], timeout=10)
    peer, _ = listener.accept()
    peer.settimeout(10)
    return client, peer


def is_open(client, peer):
    try:
        client.sendall(b"x")
    except OSError:
        return False
    return peer.recv(1) == b"x"


@pytest.mark.parametrize(("family", "host"), FAMILIES)
def test_shutting_wakes_who_waits_and_spares_other_connections(family, host):
    try:
        published, others = (socket.create_server((host, 0), family=family) for _ in range(2))
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with published, others:
        published.settimeout(10)
        (a, b), (c, d) = connect(published), connect(others)
        with a, b, c, d:
            assert shut_published([b"before", as_gloo_publishes(published)], listening=True) == 3
            assert b.recv(1) == b""
            assert a.recv(1) == b""
            with pytest.raises(OSError, match="Invalid argument"):  # not a timeout: nobody will ever come
                published.accept()
            assert is_open(c, d)


@pytest.mark.parametrize(("family", "host"), FAMILIES)
def test_who_listens_elsewhere_goes_on_whatever_numbers_are_published(family, host):
    """The number of an address may be that of a family of addresses: then it looks like one that is all zeros."""
    with (
        socket.create_server((host, 0), family=family) as published,
        socket.create_server((host, 0), family=family) as others,
    ):
        numbered = b"".join(as_gloo_publishes(published, number) for number in range(16))
        assert shut_published([numbered, bytes(32)], listening=True) == 1
        client, peer = connect(others)
        client.close()
        peer.close()


def test_who_is_still_connecting_is_shut_too():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as first, socket.socket() as late:
        first.connect(full.getsockname())  # takes the one place there is
        late.setblocking(False)
        assert late.connect_ex(full.getsockname()) != 0
        with pytest.raises(OSError, match="not connected"):
            late.getpeername()
        assert shut_published([as_gloo_publishes(full)], listening=True) >= 2
        late.settimeout(10)
        with pytest.raises(ConnectionResetError):  # else it would be tried for two minutes
            late.recv(1)
