"""The dashboard's server, which shows jobs live to whoever knows its secret."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import closing

import pytest

from elasticdl.cli.commands.look import LiveServer, News


class Shown:
    """A board with one job."""

    def __init__(self):
        self.news = News('{"x":1}')

    def overview(self):
        return News("[]")

    def job(self, namespace, name):
        if (namespace, name) not in (("", "j"), ("lab", "a/b <i>")):
            raise KeyError(name)
        return self.news


@pytest.fixture
def board():
    return Shown()


@pytest.fixture
def server(board):
    with closing(LiveServer(board)) as opened:
        yield opened


def ask(server, path, method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with closing(connection):
        connection.putrequest(method, path, skip_host=True)
        for value in [f"127.0.0.1:{server.port}"] if host is None else [host] if host else []:
            connection.putheader("Host", value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers


def test_who_knows_the_secret_sees_the_jobs_and_their_pages(server):
    secret = server.secret
    assert b'data-view="overview"' in ask(server, f"/{secret}/")[1]
    assert b'data-view="job"' in ask(server, f"/{secret}/job/-/j/")[1]
    assert ask(server, "/" + server.url("lab", "a/b <i>").split("/", 3)[3])[0] == 200
    for name in ("plotly.js", "charts.js", "page.js", "page.css"):
        assert ask(server, f"/{secret}/{name}")[0] == 200
    status, body, headers = ask(server, f"/{secret}/job/-/j/data.json")
    assert (status, json.loads(body)["content"]) == (200, {"x": 1})
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe-eval" not in headers["Content-Security-Policy"]


NOT_THERE = ["/", "//", "/{wrong}/", "/{short}/", "/data.json", "/{secret}", "/{secret}/job/-/other/",
             "/{secret}/../etc/passwd", "/{secret}/page.py", "/{secret}/job/-/j/page.js", "/%00/"]  # fmt: skip
HOSTS = [("evil.example", 403), ("", 403), ("127.0.0.1:1", 403), ("localhost:{port}", 200)]  # names for this machine


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        *(("GET", path, None, 404) for path in NOT_THERE),
        *(("GET", "/{secret}/", host, status) for host, status in HOSTS),
        *((method, "/{secret}/", None, 501) for method in ("POST", "PUT", "DELETE", "PATCH")),
    ],
)
def test_who_asks_otherwise_gets_nothing_and_nothing_can_be_changed(server, method, path, host, status):
    secret = server.secret
    path = path.format(secret=secret, wrong="x" * len(secret), short=secret[:-1])
    found, body, _ = ask(server, path, method, host and host.format(port=server.port))
    assert found == status
    assert status == 200 or secret.encode() not in body


def test_where_no_thread_is_to_be_had_the_next_connection_is_served(server, monkeypatch):
    start = threading.Thread.start

    def refuse(thread):
        if "process_request" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
                ask(server, f"/{server.secret}/")
    assert ask(server, f"/{server.secret}/")[0] == 200


def test_what_is_known_is_not_sent_again(server, board):
    path = f"/{server.secret}/job/-/j/data.json"
    known = json.loads(ask(server, path)[1])["revision"]
    assert ask(server, f"{path}?since={known}")[0] == 204
    board.news = News("{}", over=True)
    status, _, headers = ask(server, f"{path}?since={known}")
    assert (status, headers["X-Job-Over"]) == (200, "1")
    assert ask(server, path, "HEAD")[1] == b""


def test_only_this_machine_is_listened_to_and_nothing_stays(board):
    opened = LiveServer(board)
    assert opened.server_address[0] == "127.0.0.1"
    assert len(opened.secret) >= 40
    opened.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", opened.port))
