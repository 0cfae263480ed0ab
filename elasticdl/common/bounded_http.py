"""An HTTP server with a thread for each connection, and a bound on how many there are. What is served is up to its handler."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class BoundedHTTPServer(ThreadingHTTPServer):
    """Listens from the moment it is made; a connection beyond ``connections`` is closed at once.

    Raises:
        OSError: the address is not to be had.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], connections: int) -> None:
        self._room = threading.BoundedSemaphore(connections)
        self._thread: threading.Thread | None = None
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def start(self, name: str) -> None:
        """Serve in a thread of this name."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Nothing is served any more, and the port is free."""
        self.shutdown()
        self.server_close()
        if self._thread is not None:
            self._thread.join()

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)  # the base class asks for the host's name, which may take long
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread is to be had
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()
