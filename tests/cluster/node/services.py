"""What DNS and kube-proxy are to containers: the names of Services in their environment lead somewhere.

Where a container would look up ``NAME.NAMESPACE.svc``, a process of this machine can't. So a name with a port in its
environment is replaced by an address of this node, where each connection is passed on to the first pod that the Service
selects at that moment.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import socketserver
import threading

from elasticdl.kube.client import ApiError
from tests.cluster.api import Api

_NAME = re.compile(r"(?<![\w.-])([a-z0-9-]+)\.([a-z0-9-]+)\.svc(?:\.cluster\.local)?:(\d+)(?![\w.-])")
CONNECT_S = 5.0
CHUNK = 1 << 16


class Services:
    """``prefix``: the first two numbers of the node's addresses."""

    def __init__(self, api: Api, prefix: str) -> None:
        self._api = api
        self._prefix = prefix
        self._hosts = itertools.count(2)
        self._places: dict[str, str] = {}
        self._lock = threading.Lock()

    def resolved(self, text: str) -> str:
        """The text with the names of Services replaced."""
        return _NAME.sub(self._place, text)

    def _place(self, found: re.Match[str]) -> str:
        with self._lock:
            if found[0] not in self._places:
                self._places[found[0]] = self._serve(found[1], found[2], int(found[3]))
            return self._places[found[0]]

    def _serve(self, name: str, namespace: str, port: int) -> str:
        api = self._api

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ApiError, IndexError):  # the client sees that nobody is there
                    target = socket.create_connection((api.addresses(name, namespace)[0], port), CONNECT_S)
                    target.settimeout(None)
                    with target:
                        there = threading.Thread(target=_copy, args=(self.request, target), daemon=True)
                        there.start()
                        _copy(target, self.request)
                        there.join()

        address = f"{self._prefix}.0.{next(self._hosts)}"
        server = socketserver.ThreadingTCPServer((address, port), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name=f"service {name}", daemon=True).start()
        return f"{address}:{port}"


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Until either is closed, whereupon both are."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
