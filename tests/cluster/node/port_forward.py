"""The part of the kubelet's own API that `kubectl port-forward` needs: one port of a pod over a WebSocket.

Channel 0 carries what the port says, channel 1 what went wrong; each begins with the number of the port.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import select
import socket
import ssl
from http.server import BaseHTTPRequestHandler

from websocket import ABNF
from websocket._abnf import frame_buffer

PROTOCOL = "v4.channel.k8s.io"
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455
_CONNECT_S = 5.0
_CHUNK = 1 << 16
_DATA, _ERROR = b"\0", b"\1"


def forward(request: BaseHTTPRequestHandler, address: str, port: int) -> None:
    """Answer a request to forward ``port`` at ``address``; returns when either side has ended it."""
    if PROTOCOL not in request.headers.get("Sec-WebSocket-Protocol", ""):
        request.send_error(400, f"only {PROTOCOL} is spoken here")
        return
    key = request.headers["Sec-WebSocket-Key"].encode()
    request.send_response(101)
    request.send_header("Upgrade", "websocket")
    request.send_header("Connection", "Upgrade")
    request.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key + _MAGIC).digest()).decode())
    request.send_header("Sec-WebSocket-Protocol", PROTOCOL)
    request.end_headers()
    request.connection.settimeout(None)
    with contextlib.suppress(OSError, EOFError):  # whoever leaves does so without a word
        for channel in (_DATA, _ERROR):
            _send(request, channel + port.to_bytes(2, "little"))
        try:
            with socket.create_connection((address, port), _CONNECT_S) as target:
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
            data = target.recv(_CHUNK)
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
