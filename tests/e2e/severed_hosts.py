"""In namespaces of its own: a network that is cut and healed, and a disk that is full and empty again. `FOLDER`"""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import Processes
from benchmarks.storm.surroundings import MASTER, Disk, Network

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
while True:
    server.accept()[0].sendall(b"hello")
"""
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], 5000), timeout=1).recv(5).decode())"


def asks(host, other):
    """Whether one host gets an answer of another."""
    command = [*host.prefix, sys.executable, "-c", ASK, other.address]
    return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0


def cut_and_heal(processes):
    network = Network(3, processes)
    one, two, three = network.hosts
    for host in (MASTER, one):
        command = [*host.prefix, sys.executable, "-c", LISTEN, host.address]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "listening\n"
    assert sum(each.startswith("listening") for each in network.sockets_in_use()) == 2
    assert asks(two, one)
    network.cut(one, two)
    assert not asks(two, one)
    assert asks(three, one)
    assert asks(two, MASTER)
    network.heal(one, two)
    assert asks(two, one)
    network.cut(three, MASTER)
    assert not asks(three, MASTER)
    assert asks(three, one)
    network.heal(three, MASTER)
    assert asks(three, MASTER)


def fill_and_empty(folder):
    disk = Disk(folder)
    disk.fill()
    with pytest.raises(OSError, match="No space left on device"):
        (folder / "file").write_bytes(b"x")
    disk.empty()
    (folder / "file").write_bytes(bytes(4096))
    disk.close()
    assert list(folder.iterdir()) == []


if __name__ == "__main__":
    home = Path(sys.argv[1])
    fill_and_empty(home / "disk")
    with Processes(home) as holders:
        cut_and_heal(holders)
    print("all holds")
