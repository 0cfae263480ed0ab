"""A port of this machine that leads through the API server into a pod."""

import socket
import threading

import pytest

from elasticdl.kube.job_pods import forwarded
from elasticdl.kube.names import Role, labels

pytest_plugins = ["tests.cluster.fixtures"]

ECHO = """
import os, socket, threading
def echo(connection):
    while data := connection.recv(1 << 16):
        connection.sendall(data)
    connection.close()
server = socket.create_server((os.environ["IP"], 50001))
print("listening", flush=True)
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""


def start_echo(pods, name):
    env = [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    pods.create(name, {"command": ["python", "-c", ECHO], "env": env}, labels=labels("j", Role.MASTER))
    pods.said(name, "listening")


def say(address, data):
    """What comes back; nothing of a connection that is reset."""
    with connected(address) as connection, connection.makefile("rb") as answer:
        writer = threading.Thread(target=connection.sendall, args=(data,))
        writer.start()
        try:
            return answer.read(len(data))
        except ConnectionResetError:
            return b""
        finally:
            writer.join()


def connected(address):
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), 10)
    connection.settimeout(10)
    return connection


def test_it_leads_to_the_master_and_to_its_successor_and_ends_with_what_goes_through_it(place, pods):
    start_echo(pods, "first")
    with forwarded(place, "j") as address:
        assert say(address, b"hello") == b"hello"
        big = bytes(range(256)) * 4096
        assert say(address, big) == big
        pods.delete("first", grace_period_seconds=0)
        pods.gone("first")
        assert say(address, b"hello") == b""
        start_echo(pods, "second")
        connection = connected(address)
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
    with connection:
        assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connected(address)
    mine = [thread for thread in threading.enumerate() if "port" in thread.name or "process_request" in thread.name]
    for thread in mine:
        thread.join(10)
    assert not [thread.name for thread in mine if thread.is_alive()]
