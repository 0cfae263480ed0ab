"""Where Prometheus collects a job's metrics: HTTPS, for whoever has the job's certificate of role metrics or owner.

Each connection has a thread, of which there are few, and little time: whoever connects and says nothing keeps nobody
waiting. The certificate is read anew for each, so that it may be renewed while the job runs.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from elasticdl.common.channel import identify
from elasticdl.common.credentials import Identity, Role, TlsFolder
from elasticdl.master.observers.observer import Observer

READERS = frozenset({Role.METRICS, Role.OWNER})
CONNECTIONS = 16
SILENCE_SECONDS = 10.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_log = logging.getLogger(__name__)


class MetricsServer(Observer):
    """Listens from the moment it is made until it is closed, which is all that it hears of a job.

    ``exposition`` is called in a thread of the server's.

    Raises:
        OSError: the address is not to be had.
        UserError: the certificate is not one to serve with.
    """

    def __init__(self, address: tuple[str, int], tls: TlsFolder, exposition: Callable[[], bytes]) -> None:
        self._server = _Server(address, tls, exposition)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], tls: TlsFolder, exposition: Callable[[], bytes]) -> None:
        self._tls = tls
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        job = identify(tls, serves=True).job
        self.readers = {Identity(role, job).dns_name for role in READERS}
        self.exposition = exposition
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(
            self.server_address
        )  # the base class asks the name service for the host's name, which may take long
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(SILENCE_SECONDS)
        with self._context().wrap_socket(request, server_side=True) as connection:
            super().finish_request(connection, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a connection from %s to the metrics came to nothing", client_address, exc_info=True)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._tls.certificate, self._tls.key)
        context.load_verify_locations(self._tls.ca)
        return context


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    connection: ssl.SSLSocket

    def do_GET(self) -> None:
        if not self._known():
            self._answer(HTTPStatus.FORBIDDEN, b"it takes the certificate of the metrics or the owner\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(HTTPStatus.NOT_FOUND, b"there is only /metrics\n")
        else:
            self._expose()

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)

    def _known(self) -> bool:
        certificate: dict[str, Any] = self.connection.getpeercert() or {}
        return any(name in self.server.readers for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")

    def _expose(self) -> None:
        try:
            text = self.server.exposition()
        except (TimeoutError, CancelledError, RuntimeError):  # the master is too busy, or ends
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, b"the master does not answer\n")
        else:
            self._answer(HTTPStatus.OK, text)

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
