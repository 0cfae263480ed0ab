"""Which pods are a job's, and a port of loopback that leads through the API server to its master.

A job's pods are those with its labels. Each connection to the port but the first looks the master up anew, so one that was
started again is found by those who connect again. What goes through is TLS between the two ends.
"""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from typing import Any

from kubernetes.stream.ws_client import create_websocket, get_websocket_url
from websocket import ABNF, WebSocket, WebSocketException

from elasticdl.common.credentials import LOOPBACK, Role
from elasticdl.common.errors import ElasticDLError
from elasticdl.kube import names
from elasticdl.kube.client import Client, Object, path_of
from elasticdl.kube.manifests import is_running

# The server's protocol: the first byte of a frame is its channel, of data or of errors; the first frame of a channel
# holds only the port's number.
_PROTOCOL = "v4.channel.k8s.io"
_DATA = b"\0"
_CHUNK = 1 << 16
_RECORD = 1 << 14  # of TLS: what a socket that is ready takes without blocking
CLOSE_SECONDS = 0.05  # between two looks whether it is closed


def find_master(client: Client, job: str) -> Object | None:
    """The newest pod of the job's master, whatever its state; None if there is none (any more, or yet)."""
    return max(client.list("Pod", label_selector=names.selector(job, Role.MASTER)), key=_age, default=None)


def find_pods(client: Client, job: str) -> list[Object]:
    """The oldest first."""
    return sorted(client.list("Pod", label_selector=f"{names.JOB_LABEL}={job},{names.ROLE_LABEL}"), key=_age)


def _age(pod: Object) -> str:
    return str(pod["metadata"]["creationTimestamp"])


@contextlib.contextmanager
def forwarded(client: Client, job: str, pod: Object | None = None) -> Iterator[str]:
    """``host:port`` of the listener; it is closed at the end, with all that goes through it. ``pod``: the master's, if it is known."""
    with _Forward(client, job, pod) as server:
        threading.Thread(target=server.serve_forever, args=(CLOSE_SECONDS,), name="port-forward", daemon=True).start()
        try:
            yield f"{LOOPBACK}:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.cut()


class _Forward(socketserver.ThreadingTCPServer):
    """A thread for each connection, which ends when either end closes; who can't be reached just closes."""

    daemon_threads = True

    def __init__(self, client: Client, job: str, pod: Object | None) -> None:
        super().__init__((LOOPBACK, 0), socketserver.BaseRequestHandler)
        self._known = iter([pod])  # for the first connection
        self._client = client
        self._job = job
        self._open: set[socket.socket] = set()

    def cut(self) -> None:
        for each in tuple(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def process_request(self, here: Any, client_address: Any) -> None:
        self._open.add(here)
        super().process_request(here, client_address)

    def finish_request(self, here: Any, client_address: Any) -> None:
        with contextlib.suppress(ElasticDLError, OSError, WebSocketException):
            pod = next(self._known, None) or find_master(self._client, self._job)
            if pod is not None and is_running(pod):
                tunnel = self._connect(pod["metadata"]["name"])
                try:
                    _pump(here, tunnel)
                finally:
                    tunnel.shutdown()  # type: ignore[no-untyped-call]

    def shutdown_request(self, here: Any) -> None:
        self._open.discard(here)
        super().shutdown_request(here)

    def _connect(self, pod: str) -> WebSocket:
        url, headers = self._client.signed("GET", path_of("Pod", self._client.namespace, pod, "portforward"))
        url = get_websocket_url(url, [("ports", names.MASTER_PORT)])
        headers = {**headers, "sec-websocket-protocol": _PROTOCOL}
        tunnel: WebSocket = create_websocket(self._client.api.configuration, url, headers)
        return tunnel


def _pump(here: socket.socket, tunnel: WebSocket) -> None:
    """One thread for both directions: a TLS connection may not be used by two at once."""
    there: socket.socket = tunnel.sock  # type: ignore[assignment]
    outgoing = b""
    begun: set[bytes] = set()
    while True:
        sources = [there, here] if len(outgoing) < _CHUNK else [there]
        ready, writable, _ = select.select(sources, [there] if outgoing else [], [])
        if writable:
            outgoing = outgoing[there.send(outgoing[:_RECORD]) :]
        if there in ready:
            data = _received(tunnel, begun)
            if data is None:
                return
            here.sendall(data)
        if here in ready:
            data = here.recv(_CHUNK)
            if not data:
                return
            outgoing += ABNF.create_frame(_DATA + data, ABNF.OPCODE_BINARY).format()


def _received(tunnel: WebSocket, begun: set[bytes]) -> bytes | None:
    """The data that is there, perhaps none; None at the end. ``begun``: the channels that have told their port."""
    found = b""
    while True:
        opcode, frame = tunnel.recv_data_frame(control_frame=True)
        channel, data = frame.data[:1], frame.data[1:]
        if opcode == ABNF.OPCODE_CLOSE:
            return None
        if opcode == ABNF.OPCODE_BINARY:
            if channel in begun and channel != _DATA:
                return None
            found += data if channel in begun else b""
            begun.add(channel)
        # What TLS has decrypted already does not make the socket ready again.
        if not (isinstance(tunnel.sock, ssl.SSLSocket) and tunnel.sock.pending()):
            return found
