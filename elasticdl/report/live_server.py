"""The page, live: an HTTP server on loopback that only shows, and only to who knows its secret.

The secret is the first part of each path. A page of another site can't read what is here: it does not know the secret,
its name for this machine is not in the Host header that is accepted, and nothing tells it the address of a page.
"""

from __future__ import annotations

import functools
import hmac
import secrets
import socketserver
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, quote, unquote, urlsplit

from elasticdl.report.page import LIVE_POLICY, as_json, asset, live_page, plotly_script

LOOPBACK = "127.0.0.1"
SILENCE_SECONDS = 20.0
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "json": "application/json"}
_LENGTH = 32  # bytes of the secret


class Board(Protocol):
    """What there is to show; asked in any thread."""

    def overview(self) -> News: ...

    def job(self, namespace: str, name: str) -> News:
        """
        Raises:
            KeyError: there is no such job.
        """


class News:
    """``content``: JSON; ``over``: it will not change any more."""

    def __init__(self, content: str, *, over: bool = False, notice: str = "") -> None:
        self.revision = str(hash((content, notice)))
        self.over = over
        self.body = f'{{"revision":"{self.revision}","notice":{as_json(notice)},"content":{content}}}'.encode()


class LiveServer(ThreadingHTTPServer):
    """Serves from the moment it is made until it is closed.

    Raises:
        OSError: the port is not to be had.
    """

    def __init__(self, board: Board, port: int = 0) -> None:
        self.board = board
        self.secret = secrets.token_urlsafe(_LENGTH)
        super().__init__((LOOPBACK, port), _Handler)
        self.port: int = self.server_address[1]
        self.hosts = {f"{name}:{self.port}" for name in (LOOPBACK, "localhost")}
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="dashboard", daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # the base class asks for the host's name, which may take long

    def url(self, namespace: str = "", name: str = "") -> str:
        """Of a job's page, or of the list of jobs."""
        return f"http://{LOOPBACK}:{self.port}/{self.secret}/{job_path(namespace, name) if name else ''}"

    def close(self) -> None:
        """Nothing is served any more, and the port is free."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is nobody's business."""

    @functools.cached_property
    def files(self) -> dict[str, bytes]:
        texts = {"plotly.js": plotly_script(), **{name: asset(name) for name in ("charts.js", "page.js", "page.css")}}
        return {name: text.encode() for name, text in texts.items()}


def job_path(namespace: str, name: str) -> str:
    """Below the secret; a job of this machine has no namespace."""
    return f"job/{quote(namespace, safe='') or '-'}/{quote(name, safe='')}/"


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = SILENCE_SECONDS
    protocol_version = "HTTP/1.0"  # one request a connection: none is served any more once the server is closed
    server_version, sys_version = "elasticdl", ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, secret, *path = f"{url.path}/".split("/")
        if self.headers.get("Host") not in self.server.hosts:
            self._answer(HTTPStatus.FORBIDDEN, "html", b"this address is not for you")
        elif not hmac.compare_digest(secret.encode(), self.server.secret.encode()):
            self._answer(HTTPStatus.NOT_FOUND, "html", b"nothing is here")
        else:
            self._show([unquote(part) for part in path[:-1]], parse_qs(url.query).get("since", [""])[0])

    do_HEAD = do_GET

    def _show(self, path: list[str], since: str) -> None:
        board = self.server.board
        try:
            match path:
                case [""]:
                    self._answer(HTTPStatus.OK, "html", live_page("jobs", "overview", "").encode())
                case ["data.json"]:
                    self._tell(board.overview(), since)
                case [name] if name in self.server.files:
                    self._answer(HTTPStatus.OK, name.rpartition(".")[2], self.server.files[name])
                case ["job", namespace, name, ""]:
                    board.job(namespace.removeprefix("-"), name)
                    self._answer(HTTPStatus.OK, "html", live_page(name, "job", "../../../").encode())
                case ["job", namespace, name, "data.json"]:
                    self._tell(board.job(namespace.removeprefix("-"), name), since)
                case _:
                    self._answer(HTTPStatus.NOT_FOUND, "html", b"nothing is here")
        except KeyError:
            self._answer(HTTPStatus.NOT_FOUND, "html", b"there is no such job")

    def _tell(self, news: News, since: str) -> None:
        if news.revision == since:
            self._answer(HTTPStatus.NO_CONTENT, "json", b"", over=news.over)
        else:
            self._answer(HTTPStatus.OK, "json", news.body, over=news.over)

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, *, over: bool = False) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{_TYPES[kind]}; charset=utf-8",
            "Cache-Control": "no-store",
            "Content-Security-Policy": LIVE_POLICY,
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            **({"X-Job-Over": "1"} if over else {}),
            **({} if status is HTTPStatus.NO_CONTENT else {"Content-Length": str(len(body))}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The secret is in the path: nothing is logged."""
