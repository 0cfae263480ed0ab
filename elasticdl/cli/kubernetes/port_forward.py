"""A port of this machine's loopback that leads through the API server to a job's master, whatever pod it is in.

Each connection looks the master up anew, so one that was started again is found by those who connect again. What goes
through is TLS between the two ends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kubernetes import client
from kubernetes.stream import portforward
from websocket import WebSocketConnectionClosedException

from elasticdl.cli.kubernetes.api import Cluster
from elasticdl.cli.kubernetes.pods import find_master, is_running
from elasticdl.common.environment import LOOPBACK
from elasticdl.common.errors import ElasticDLError
from elasticdl.common.manifests.names import MASTER_PORT

_CHUNK = 1 << 16
JOIN_SECONDS = 5.0
GOODBYE_SECONDS = 3.0


@contextlib.contextmanager
def forwarded(cluster: Cluster, job: str) -> Iterator[str]:
    """``host:port`` of the listener; it is closed at the end, with all that goes through it."""
    with socket.create_server((LOOPBACK, 0)) as server:
        forward = _PortForward(cluster, job)
        accepting = threading.Thread(target=forward.accept, args=(server,), name="port-forward", daemon=True)
        accepting.start()
        try:
            yield f"{LOOPBACK}:{server.getsockname()[1]}"
        finally:
            forward.close(server)
            accepting.join(JOIN_SECONDS)


@dataclass(slots=True)
class _PortForward:
    cluster: Cluster
    job: str
    open: set[socket.socket] = field(default_factory=set)
    threads: list[threading.Thread] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False

    def accept(self, server: socket.socket) -> None:
        while True:
            try:
                here, _ = server.accept()
            except OSError:  # closed
                return
            with self.lock:
                if self.closed:
                    here.close()
                    return
                self.open.add(here)
                thread = threading.Thread(target=self._pass_on, args=(here,), name="port-forward", daemon=True)
                self.threads = [each for each in self.threads if each.is_alive()] + [thread]
            thread.start()

    def close(self, server: socket.socket) -> None:
        with self.lock:
            self.closed = True
            for each in self.open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes who waits in accept
        for thread in self.threads:
            thread.join(JOIN_SECONDS)

    def _pass_on(self, here: socket.socket) -> None:
        """Until either end closes; who can't be reached just closes."""
        try:
            with contextlib.suppress(ElasticDLError, OSError, client.ApiException):
                pod = find_master(self.cluster, self.job)
                if pod is not None and is_running(pod):
                    _pump(here, self._connect(pod["metadata"]["name"]))
        finally:
            with self.lock:
                self.open.discard(here)
            here.close()

    def _connect(self, pod: str) -> Any:
        api = client.CoreV1Api(self.cluster.another_client())
        tunnel = portforward(
            api.connect_get_namespaced_pod_portforward, pod, self.cluster.namespace, ports=str(MASTER_PORT)
        )
        _quieten(tunnel.websocket)
        return tunnel


def _pump(here: socket.socket, tunnel: Any) -> None:
    there = tunnel.socket(MASTER_PORT)
    there.setblocking(True)
    ends = {here: there, there: here}
    try:
        while True:
            ready, _, _ = select.select([here, there], [], [])
            for source in ready:
                data = source.recv(_CHUNK)
                if not data:
                    return
                ends[source].sendall(data)
    finally:
        _say_goodbye(there)
        tunnel.close()


def _say_goodbye(there: socket.socket) -> None:
    """Take what still comes: the client's own thread, which writes it, would die with a traceback if nobody did."""
    with contextlib.suppress(OSError):
        there.settimeout(GOODBYE_SECONDS)
        there.shutdown(socket.SHUT_WR)
        while there.recv(_CHUNK):
            continue


def _quieten(websocket: Any) -> None:
    """A connection that breaks is one that ends: else the client's own thread would die with a traceback."""
    receive = websocket.recv_data_frame

    def recv_data_frame(control_frame: bool = False) -> Any:
        try:
            return receive(control_frame)
        except OSError as error:
            raise WebSocketConnectionClosedException(str(error)) from error

    websocket.recv_data_frame = recv_data_frame
    if isinstance(websocket.sock, ssl.SSLSocket):  # a plain one, of a server without TLS, can't be given another method
        setattr(websocket.sock, "send", _lenient(websocket.sock.send))  # noqa: B010 - a method is meant to be replaced


def _lenient(send: Callable[[bytes], int]) -> Callable[[bytes], int]:
    """What can't be sent any more is lost; that the connection has ended is then told by reading from it."""

    def attempt(data: bytes) -> int:
        try:
            return send(data)
        except OSError:
            return len(data)

    return attempt
