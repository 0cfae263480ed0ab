"""The kubelet's own API, as far as `kubectl logs` and `kubectl port-forward` need it."""

from __future__ import annotations

import contextlib
import datetime
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.cluster.node.port_forward import forward
from tests.cluster.node.reporter import timestamp
from tests.cluster.pki import Pair

PORT = 10250  # as on every node; it also tells other clusters of this machine that the address is taken
_POLL_S = 0.1
_CHUNK = 1 << 16
_OWN_TIME = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


@dataclass(frozen=True, slots=True)
class LogFile:
    """A container's output, and whether more may come."""

    path: Path
    growing: Callable[[], bool]


# From namespace, pod, container and whether the previous run is meant; None if there is no such container.
FindLog = Callable[[str, str, str, bool], LogFile | None]
# From namespace and pod; None if there is no such pod.
FindAddress = Callable[[str, str], str | None]


@dataclass(frozen=True, slots=True)
class Find:
    """What is asked for, by name."""

    log: FindLog
    address: FindAddress


def bind(address: str, found: Find, identity: Pair, authority: str) -> ThreadingHTTPServer:
    """A server at ``address`` for holders of a certificate of ``authority``.

    Raises:
        OSError: the address is taken.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(identity.certificate, identity.key)

    class Handler(_Handler):
        find = found

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


def serve(server: ThreadingHTTPServer) -> None:
    threading.Thread(target=server.serve_forever, name="logs", daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    find: Find
    protocol_version = "HTTP/1.1"  # a connection that becomes another protocol is not for 1.0
    timeout = 30

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        parts = url.path.strip("/").split("/")
        if len(parts) >= 3 and parts[0] == "portForward":
            self._forward(parts[1], parts[2], query)
            return
        self.close_connection = True
        found = None
        if len(parts) == 4 and parts[0] == "containerLogs":
            found = self.find.log(parts[1], parts[2], parts[3], query.get("previous") == "true")
        if found is None or not found.path.exists():
            self.send_error(404, "no such log")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            content = _content(found, query)
            for chunk in _stamped(content) if query.get("timestamps") == "true" else content:
                self.wfile.write(chunk)

    def _forward(self, namespace: str, pod: str, query: dict[str, str]) -> None:
        address = self.find.address(namespace, pod)
        if address is None or not query.get("port", "").isdigit():
            self.send_error(404, "no such pod, or no port")
            return
        forward(self, address, int(query["port"]))

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line."""


def _content(log: LogFile, query: dict[str, str]) -> Iterator[bytes]:
    left = int(query.get("limitBytes", 1 << 62))
    with log.path.open("rb") as file:
        if "tailLines" in query:
            _skip_to_last_lines(log.path, int(query["tailLines"]), file.seek)
        while left > 0:
            growing = log.growing()
            chunk = file.read(min(_CHUNK, left))
            left -= len(chunk)
            if chunk:
                yield chunk
            elif not growing or query.get("follow") != "true":
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
            stamp = told.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ") if told else timestamp(micro=True)
            yield stamp.encode() + b" " + line + b"\n"
    if rest:
        yield timestamp(micro=True).encode() + b" " + rest


def _skip_to_last_lines(path: Path, count: int, seek: Callable[[int], int]) -> None:
    content = path.read_bytes()
    lines = content.splitlines(keepends=True)
    seek(len(content) - sum(map(len, lines[-count:] if count else [])))
