"""The kubelet's own API, as far as `kubectl logs` and `kubectl port-forward` need it."""

from __future__ import annotations

import contextlib
import datetime
import re
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.cluster.node.port_forward import forward
from tests.cluster.node.status import timestamp
from tests.cluster.pki import Pair

PORT = 10250  # as on every node; it also tells other clusters of this machine that the address is taken
_POLL_S = 0.1
_CHUNK = 1 << 16
_OWN_TIME = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")

# A container's output, and whether more may come: from namespace, pod and container.
FindLog = Callable[[str, str, str], tuple[Path, Callable[[], bool]] | None]
# Of a pod, from namespace and name.
FindAddress = Callable[[str, str], str | None]


def bind(address: str, log: FindLog, of_pod: FindAddress, identity: Pair, authority: str) -> ThreadingHTTPServer:
    """A server at ``address`` for holders of a certificate of ``authority``.

    Raises:
        OSError: the address is taken.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(identity.certificate, identity.key)

    class Handler(_Handler):
        find_log = staticmethod(log)
        find_address = staticmethod(of_pod)

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
    find_log: FindLog
    find_address: FindAddress
    protocol_version = "HTTP/1.1"  # a connection that becomes another protocol is not for 1.0
    timeout = 30

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        self.close_connection = True
        match url.path.strip("/").split("/"):
            case ["portForward", namespace, pod, *_] if query.get("port", "").isdigit():
                if address := self.find_address(namespace, pod):
                    forward(self, address, int(query["port"]))
                    return
            case ["containerLogs", namespace, pod, container]:
                found = self.find_log(namespace, pod, container)
                if found and found[0].exists():
                    self._send_log(*found, query)
                    return
        self.send_error(404, "no such log or pod")

    def _send_log(self, path: Path, growing: Callable[[], bool], query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            content = _content(path, growing, query)
            for chunk in _stamped(content) if query.get("timestamps") == "true" else content:
                self.wfile.write(chunk)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not worth a line."""


def _content(path: Path, growing: Callable[[], bool], query: dict[str, str]) -> Iterator[bytes]:
    with path.open("rb") as file:
        while True:
            more = growing()
            chunk = file.read(_CHUNK)
            if chunk:
                yield chunk
            elif not more or query.get("follow") != "true":
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
