"""A job to look at: ``report`` writes it as one HTML file, ``dashboard`` shows it live in a browser on this machine, with a list of
all jobs.

The dashboard is an HTTP server on loopback that only shows, and only to who knows its secret, which is the first part of each path. A
page of another site can't read what is here: it does not know the secret, its name for this machine is not in the Host header that is
accepted, and nothing tells it the address of a page. A page is made when it is asked for, and kept for a moment.
"""

from __future__ import annotations

import errno
import functools
import hmac
import os
import secrets
import socketserver
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

import click

from elasticdl.cli import screens
from elasticdl.cli.commands.jobs import PLACE, all_jobs, find, job_argument, place_of
from elasticdl.cli.job_handle import JobHandle, statuses_of
from elasticdl.cli.parsing import Option, command
from elasticdl.cli.signals import Interrupted
from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.common.reason import flat
from elasticdl.job.facts import Facts
from elasticdl.job.jobdir import write_aside
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.report.page import LIVE_POLICY, MARK, as_json, asset, live_page, page_data, plotly_script
from elasticdl.report.page import report as as_page

SUFFIX = ".jsonl"
HEAD_BYTES = 500  # of a report, in which its mark stands
# What was made is kept for so long, or for so many times as long as making it took: a list of many jobs, or a long journal.
KEPT_SECONDS = 3.0
KEPT_TIMES = 4.0
LOOPBACK = "127.0.0.1"
SILENCE_SECONDS = 20.0
POLL = 0.1  # seconds
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "json": "application/json"}
_LENGTH = 32  # bytes of the secret
Key = tuple[str, str]  # namespace and name
Clock = Callable[[], float]
T = TypeVar("T")


@command(
    job_argument(
        "name of the job, or path of a journal, with a / or ending in .jsonl; may be left out if only one runs"
    ),
    *PLACE,
    Option(["--out"], default="", metavar="FILE", help="the file to write (JOB.html in the current folder)"),
    help="Write a job's history as one HTML file: where the time went, workers, pauses, curves. It needs nothing else, "
    "no network either.",
)
def report(job: str | None, out: str, **given: Any) -> int:
    is_path = job is not None and (os.sep in job or job.endswith(SUFFIX))
    if is_path:
        path = Path(str(job))
        history, name = _read_file(path), path.stem
    else:
        handle = find(job, given)
        history, name = history_of(handle, time.time()), handle.name
    target = Path(out or f"{name}.html")
    _require_report(target)
    try:
        write_aside(target, as_page(page_data(history)))
    except OSError as error:
        raise UserError(f"--out {target} can't be written: {error.strerror}") from None
    print(target)
    return 0


def _read_file(path: Path) -> Facts:
    try:
        with path.open(errors="replace") as lines:
            found = Facts(path.stem).read(lines).conclude()
    except OSError as error:
        raise UserError(f"the journal {path} can't be read: {error.strerror}") from None
    if not found.counts:
        raise UserError(
            f"{path} has no entry of a journal: give journal.jsonl of a job, or what `elasticdl events --json` prints"
        )
    return found


def _require_report(target: Path) -> None:
    """What is in the place of the report is one, too.

    Raises:
        UserError: it is something else. A pipe would not be read to its end, and a device would be replaced.
    """
    if not os.path.exists(target):  # or writing will say what is wrong
        return
    if not target.is_file():
        raise UserError(f"--out {target} is no plain file; give one, as in --out job.html")
    try:
        with target.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        raise UserError(f"{target} is there and can't be read, so it may be no report: give another --out") from None
    if head and MARK.encode() not in head:
        raise UserError(f"{target} is there, and is no report of a job: remove it first, or give another --out")


@command(
    job_argument("name of the job whose page to print; all jobs are shown in any case"),
    *PLACE,
    Option(
        ["--port"], type=click.IntRange(0, 65535), default=0, metavar="PORT", help="port on 127.0.0.1 (0: a free one)"
    ),
    help="Show jobs live in a browser on this machine, until Ctrl-C. Only who knows the printed address can look.",
)
def dashboard(job: str | None, port: int, **given: Any) -> int:
    handle = find(job, given) if job is not None else None
    if handle is None and place_of(given):
        all_jobs(given)  # a context that there is not is told now
    board = LiveBoard(functools.partial(all_jobs, given))
    # The first signal ends the waiting, another one what still goes on then.
    with closing(LiveServer(board, port)) as server, suppress(Interrupted):
        where = server.url(handle.namespace, handle.name) if handle else server.url()
        print(
            f"{where}\nuntil Ctrl-C; keep the address to yourself, as whoever has it on this machine can look",
            flush=True,
        )
        while True:  # a long sleep would not end if the signal came just before it
            time.sleep(POLL)
    return 0


class Kept(Generic[T]):
    """Makes something when it is asked for. Whoever asks meanwhile waits for it, and whoever asks soon after is given the same."""

    def __init__(self, make: Callable[[], T], clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._made: tuple[T, float] | None = None  # until when it is kept
        self._making = threading.Lock()

    def get(self) -> T:
        with self._making:
            began = self._clock()
            if self._made is None or began >= self._made[1]:
                made, now = self._make(), self._clock()
                self._made = made, now + max(KEPT_SECONDS, KEPT_TIMES * (now - began))
            return self._made[0]


class News:
    """``content``: JSON; null if nothing new can be shown. ``over``: it will not change any more."""

    def __init__(self, content: str, *, over: bool = False, notice: str = "") -> None:
        self.revision = str(hash((content, notice)))
        self.over = over
        self.body = f'{{"revision":"{self.revision}","notice":{as_json(notice)},"content":{content}}}'.encode()


class LiveBoard:
    """What there is to show; asked in any thread. ``list_jobs`` is given whom to tell what is missing; ``clock``: seconds since the epoch."""

    def __init__(
        self, list_jobs: Callable[[Callable[[str], None]], Sequence[JobHandle]], clock: Clock = time.time
    ) -> None:
        self._list = list_jobs
        self._clock = clock
        self._known: dict[Key, JobHandle] = {}
        self._missing = Kept(self._list_jobs, clock)
        self._overview = Kept(self._make_overview, clock)
        self._pages: dict[Key, Kept[News]] = {}

    def overview(self) -> News:
        return self._overview.get()

    def job(self, namespace: str, name: str) -> News:
        """
        Raises:
            KeyError: there is no such job.
        """
        self._missing.get()
        key = namespace, name
        if key not in self._known:
            raise KeyError(key)
        return self._pages.setdefault(key, Kept(functools.partial(self._make_page, key), self._clock)).get()

    def _list_jobs(self) -> str:
        """Returns what is missing. Jobs of a cluster that does not answer stay as they were: their pages may be open."""
        missing: list[str] = []
        try:
            jobs = {(handle.namespace, handle.name): handle for handle in self._list(missing.append)}
            kept = {key: job for key, job in self._known.items() if missing and key[0]}
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a cluster must not end the list for good
            missing, jobs, kept = [_words(error)], {}, self._known
        self._known = jobs | {key: job for key, job in kept.items() if key not in jobs}
        self._pages = {key: page for key, page in self._pages.items() if key in self._known}
        return "; ".join(missing)

    def _make_overview(self) -> News:
        missing, jobs = self._missing.get(), self._known
        rows = [
            {"name": name, "namespace": namespace, "page": job_path(namespace, name), **screens.facts(status)}
            for (namespace, name), status in zip(jobs, statuses_of([*jobs.values()]), strict=True)
        ]
        return News(as_json(rows), notice=missing)

    def _make_page(self, key: Key) -> News:
        """What fails is told in the page. Raises KeyError if the job has just gone."""
        handle = self._known[key]  # looked up each time: another job may have the name by now
        try:
            history = history_of(handle, self._clock())
            content = as_json(page_data(history))
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one job is told in its page
            return News(
                "null", notice=f"This page could not be brought up to date, and is tried again: {_words(error)}"
            )
        # A page that is over is asked for rarely: so it is only once the journal itself has told the end.
        return News(content, over=history.counts["job_finished"] > 0)


def _words(error: Exception) -> str:
    return flat(error) or type(error).__name__


def history_of(handle: JobHandle, now: float) -> Facts:
    """What its journal tells, with what its status tells beyond that."""
    try:
        status = handle.status()  # first: of a job that is over by then the journal tells all
    except ElasticDLError:
        # The journal may be there without its master, which may just have ended, and without a status.
        status = None
    with closing(handle.journal()) as lines:
        return with_status(Facts(handle.name).read(lines), status, now)


def with_status(found: Facts, status: pb.JobStatus | None, now: float) -> Facts:
    """With what the job's status says of a job that has not told its end. ``found``: it is concluded and changed."""
    goes_on = status is not None and status.phase in ("starting", "pending", "running", "waiting", "stopping")
    found.conclude(now if goes_on else 0.0)
    if not found.counts:  # else it would have begun in 1970
        found.began = found.until = now
    if found.over or status is None:
        return found
    if goes_on and found.phase not in ("pending", status.phase):  # the journal is the newer one
        return found
    found.phase, found.reason, found.over = status.phase, status.reason, screens.is_over(status)
    return found


class LiveServer(ThreadingHTTPServer):
    """Serves from the moment it is made until it is closed.

    Raises:
        UserError: the port is not to be had.
    """

    def __init__(self, board: LiveBoard, port: int = 0) -> None:
        self.board = board
        self.secret = secrets.token_urlsafe(_LENGTH)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"is not to be had: {error.strerror}"
            raise UserError(f"--port {port} {why}; give another, or leave it out for a free one") from None
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
