"""The kubelet's own API, as far as `kubectl logs` and `kubectl port-forward` need it.

A port of a pod is forwarded over a WebSocket: channel 0 carries what the port says, channel 1 what went wrong; each begins
with the number of the port.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import re
import select
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from websocket import ABNF
from websocket._abnf import frame_buffer

from tests.cluster.node.pod import Pod
from tests.cluster.node.services import CHUNK, CONNECT_S
from tests.cluster.node.status import timestamp
from tests.cluster.settings import NodeSettings

PORT = 10250  # as on every node; it also tells other clusters of this machine that the address is taken
PROTOCOL = "v4.channel.k8s.io"
_POLL_S = 0.1
_OWN_TIME = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455
_DATA, _ERROR = b"\0", b"\1"

FindPod = Callable[[str, str], Pod | None]  # from namespace and name


def bind(address: str, find: FindPod, settings: NodeSettings) -> ThreadingHTTPServer:
    """A server at ``address`` for holders of a certificate of the cluster.

    Raises:
        OSError: the address is taken.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(settings.own / "kubelet.crt", settings.own / "kubelet.key")

    class Handler(_Handler):
        find_pod = staticmethod(find)

    server = ThreadingHTTPServer((address, PORT), Handler, bind_and_activate=False)
    server.allow_reuse_address = False
    try:
        server.server_bind()
        server.server_activate()
    except OSError:
        server.server_close()
        raise
    # The handshake is left to the thread of each connection: a slow client holds up nobody else.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return server


class _Handler(BaseHTTPRequestHandler):
    find_pod: FindPod
    protocol_version = "HTTP/1.1"  # a connection that becomes another protocol is not for 1.0
    timeout = 30

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.close_connection = True
        what, *path = url.path.strip("/").split("/")
        pod = self.find_pod(path[0], path[1]) if len(path) > 1 else None
        if pod and what == "portForward" and query.get("port", "").isdigit():
            forward(self, pod.address, int(query["port"]))
        elif pod and what == "containerLogs" and path[2:] == [pod.container["name"]] and pod.log.exists():
            self._send_log(pod, query)
        else:
            self.send_error(404, "no such log or pod")

    def _send_log(self, pod: Pod, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            content = _content(pod, follow=query.get("follow") == "true")
            for chunk in _stamped(content) if query.get("timestamps") == "true" else content:
                self.wfile.write(chunk)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line."""


def _content(pod: Pod, *, follow: bool) -> Iterator[bytes]:
    with pod.log.open("rb") as file:
        while True:
            more = follow and pod.process is not None
            if chunk := file.read(CHUNK):
                yield chunk
            elif not more:
                return
            else:
                time.sleep(_POLL_S)


def _stamped(content: Iterable[bytes]) -> Iterator[bytes]:
    """Before each line the time that it begins with; before others the time at which they are read."""
    rest = b""
    for chunk in content:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            own = _OWN_TIME.match(line)
            told = datetime.datetime.fromisoformat(own[0].decode().replace(",", ".")) if own else None
            yield timestamp(told, micro=True).encode() + b" " + line + b"\n"
    if rest:
        yield timestamp(micro=True).encode() + b" " + rest


def forward(request: BaseHTTPRequestHandler, address: str, port: int) -> None:
    """Answer a request to forward ``port`` at ``address``; returns when either side has ended it."""
    if PROTOCOL not in request.headers.get("Sec-WebSocket-Protocol", ""):
        request.send_error(400, f"only {PROTOCOL} is spoken here")
        return
    key = request.headers["Sec-WebSocket-Key"].encode()
    request.send_response(101)
    accepted = base64.b64encode(hashlib.sha1(key + _MAGIC).digest()).decode()
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accepted}
    for name, value in {**headers, "Sec-WebSocket-Protocol": PROTOCOL}.items():
        request.send_header(name, value)
    request.end_headers()
    request.connection.settimeout(None)
    with contextlib.suppress(OSError, EOFError):  # whoever leaves does so without a word
        for channel in (_DATA, _ERROR):
            _send(request, channel + port.to_bytes(2, "little"))
        try:
            with socket.create_connection((address, port), CONNECT_S) as target:
                target.settimeout(None)
                _pump(request, target)
        except ConnectionRefusedError as error:
            _send(request, _ERROR + f"port {port} of {address}: {error}".encode())
        _send(request, b"", ABNF.OPCODE_CLOSE)


def _pump(request: BaseHTTPRequestHandler, target: socket.socket) -> None:
    """In one thread, as a TLS connection is not to be read and written by two at once."""
    connection: ssl.SSLSocket = request.connection
    frames = frame_buffer(lambda size: _read(connection, size), True)
    while True:
        waiting = connection.pending() > 0
        ready, _, _ = select.select([connection, target], [], [], 0 if waiting else None)
        if waiting or connection in ready:
            frame = frames.recv_frame()
            if frame.opcode == ABNF.OPCODE_CLOSE:
                raise EOFError
            message = frame.data
            if frame.opcode == ABNF.OPCODE_BINARY and isinstance(message, bytes) and message[:1] == _DATA:
                target.sendall(message[1:])
        if target in ready:
            data = target.recv(CHUNK)
            if not data:
                return
            _send(request, _DATA + data)


def _read(connection: ssl.SSLSocket, size: int) -> bytes:
    found = connection.recv(size)
    if not found:
        raise EOFError
    return found


def _send(request: BaseHTTPRequestHandler, data: bytes, opcode: int = ABNF.OPCODE_BINARY) -> None:
    """A server's frames are not masked."""
    request.wfile.write(ABNF(1, 0, 0, 0, opcode, 0, data).format())
    request.wfile.flush()
