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
from collections.abc import Iterator
from dataclasses import dataclass, field

from kubernetes.stream.ws_client import create_websocket, get_websocket_url
from websocket import ABNF, WebSocket, WebSocketException

from elasticdl.common.environment import LOOPBACK
from elasticdl.common.errors import ElasticDLError
from elasticdl.kubernetes.client import Client, path_of
from elasticdl.kubernetes.job_pods import find_master, is_running
from elasticdl.kubernetes.manifests.names import MASTER_PORT

# The server's protocol: the first byte of a frame is its channel, of data or of errors; the first frame of a channel
# holds only the port's number.
_PROTOCOL = "v4.channel.k8s.io"
_DATA = b"\0"
_CHUNK = 1 << 16
_RECORD = 1 << 14  # of TLS: what a socket that is ready takes without blocking
JOIN_SECONDS = 5.0


@contextlib.contextmanager
def forwarded(client: Client, job: str) -> Iterator[str]:
    """``host:port`` of the listener; it is closed at the end, with all that goes through it."""
    with socket.create_server((LOOPBACK, 0)) as server:
        forward = _PortForward(client, job)
        accepting = threading.Thread(target=forward.accept, args=(server,), name="port-forward", daemon=True)
        accepting.start()
        try:
            yield f"{LOOPBACK}:{server.getsockname()[1]}"
        finally:
            forward.close(server)
            accepting.join(JOIN_SECONDS)


@dataclass(slots=True)
class _PortForward:
    client: Client
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
            with contextlib.suppress(ElasticDLError, OSError, WebSocketException):
                pod = find_master(self.client, self.job)
                if pod is not None and is_running(pod):
                    tunnel = self._connect(pod["metadata"]["name"])
                    try:
                        _pump(here, tunnel)
                    finally:
                        tunnel.shutdown()  # type: ignore[no-untyped-call]
        finally:
            with self.lock:
                self.open.discard(here)
            here.close()

    def _connect(self, pod: str) -> WebSocket:
        url, headers = self.client.signed("GET", path_of("Pod", self.client.namespace, pod, "portforward"))
        url = get_websocket_url(url, [("ports", MASTER_PORT)])
        headers = {**headers, "sec-websocket-protocol": _PROTOCOL}
        tunnel: WebSocket = create_websocket(self.client.api.configuration, url, headers)
        return tunnel


def _pump(here: socket.socket, tunnel: WebSocket) -> None:
    """One thread for both directions: a TLS connection may not be used by two at once."""
    there: socket.socket = tunnel.sock  # type: ignore[assignment]
    frames, outgoing = _Frames(tunnel), b""
    while True:
        sources = [there, here] if len(outgoing) < _CHUNK else [there]
        ready, writable, _ = select.select(sources, [there] if outgoing else [], [])
        if writable:
            outgoing = outgoing[there.send(outgoing[:_RECORD]) :]
        if there in ready:
            data = frames.read()
            if data is None:
                return
            here.sendall(data)
        if here in ready:
            data = here.recv(_CHUNK)
            if not data:
                return
            outgoing += ABNF.create_frame(_DATA + data, ABNF.OPCODE_BINARY).format()


class _Frames:
    def __init__(self, tunnel: WebSocket) -> None:
        self._tunnel = tunnel
        self._begun: set[bytes] = set()

    def read(self) -> bytes | None:
        """The data that is there, perhaps none; None at the end."""
        found = b""
        while True:
            opcode, frame = self._tunnel.recv_data_frame(control_frame=True)
            channel, data = frame.data[:1], frame.data[1:]
            if opcode == ABNF.OPCODE_CLOSE:
                return None
            if opcode == ABNF.OPCODE_BINARY:
                if channel in self._begun and channel != _DATA:
                    return None
                found += data if channel in self._begun else b""
                self._begun.add(channel)
            socket_ = self._tunnel.sock
            # What TLS has decrypted already does not make the socket ready again.
            if not (isinstance(socket_, ssl.SSLSocket) and socket_.pending()):
                return found
