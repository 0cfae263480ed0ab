"""One of the two members of a world in which the other freezes in the middle of a transfer: RANK STORE_PORT [VICTIM].

Rank 1 freezes the process VICTIM, or itself, when the beginning of a broadcast has come and its end has not. A line on
standard input says that the world is broken. While the world connects, a thread opens connections of its own, which have
to outlive it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time

import horovod.torch as hvd
import torch

from elasticdl.elastic.collectives.port import Endpoint
from elasticdl.elastic.core.errors import WorldBroken
from elasticdl.elastic.core.world import Member, World
from elasticdl.elastic.torch.collective import TorchCollective

ELEMENTS = 32 << 20  # more than all buffers on the way take


def freeze_in_transfer(tensor: torch.Tensor, victim: int) -> None:
    while tensor[0] == tensor[-1]:
        pass
    os.kill(victim, signal.SIGSTOP)


def open_connections(connected: threading.Event, opened: list[tuple[socket.socket, socket.socket]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        while not connected.is_set():
            client = socket.create_connection(listener.getsockname())
            opened.append((client, listener.accept()[0]))
            time.sleep(0.01)


def is_open(client: socket.socket, peer: socket.socket) -> bool:
    try:
        client.sendall(b"x")
    except OSError:
        return False
    return peer.recv(1) == b"x"


def main(rank: int, store_port: int, victim: int) -> None:
    collective = TorchCollective(hvd, Endpoint(store_port, "lo"), reduce_on_gpu=False)
    connected, opened = threading.Event(), []
    others = threading.Thread(target=open_connections, args=(connected, opened))
    others.start()
    collective.start(World(1, tuple(Member(number, "host", 0, True) for number in range(2)), rank))
    connected.set()
    others.join()
    tensor = torch.zeros(ELEMENTS)

    def break_when_told() -> None:
        sys.stdin.readline()
        collective.break_world()

    threading.Thread(target=break_when_told, daemon=True).start()
    if rank == 1:
        threading.Thread(target=freeze_in_transfer, args=(tensor, victim or os.getpid()), daemon=True).start()
    try:
        while True:
            if rank == 0:
                tensor += 1
            collective.broadcast_([tensor], "tensor")
    except WorldBroken:
        lost = sum(not is_open(*pair) for pair in opened)
        print(f"noticed, {lost} of the other connections lost" if lost or not opened else "noticed", flush=True)
    collective.stop()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
