"""The report and the dashboard: what the page is given, that it holds whatever a job is called, and who is shown it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import threading
from contextlib import closing

import pytest
from history_kit import STARTED, disturbed, eventful, line, storm

from elasticdl.cli.__main__ import main
from elasticdl.cli.commands.look import KEPT_SECONDS, LiveBoard, LiveServer, News
from elasticdl.job.facts import Facts
from elasticdl.job.jobdir import create_job_dir, write_aside
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.report import page as pages
from elasticdl.report.page import as_json, duration, live_page, page_data, percent, report, sentence

NASTY = "</script><script>alert(1)</script>&amp;\"'\u2028<!--"


def read(lines):
    return Facts("j").read(lines).conclude()


# ---- the page ----


def test_what_is_said_in_words():
    said = "79 % of the 1 min 40 s was training; 11 % went to failures; 10 % went to starting."
    assert (sentence(read(disturbed())), sentence(read([]))) == (said, "Nothing has happened yet.")
    several = "12 % went to starting (2 times); 10 % went to ending; 7 % went to waiting; 23 % to the rest."
    assert sentence(read(eventful())).endswith(several)
    spoken = {0: "0 s", 0.0123: "0.012 s", 12.3: "12 s", 60: "1 min", 3725: "1 h 2 min", 90_000: "1 d 1 h"}
    assert {seconds: duration(seconds) for seconds in spoken} == spoken
    assert [percent(share) for share in (0, 1, 0.001, 0.999, 0.126)] == ["0 %", "100 %", "< 1 %", "> 99 %", "13 %"]


COMPARED = line(40, "epoch_finished", epoch=0, step=1300, loss=0.5, compared=1280, compared_workers=3)


@pytest.mark.parametrize(
    ("lines", "fact", "said"),
    [
        ([*disturbed(), COMPARED], "same state", "on all 3 workers after step 1,280"),
        (disturbed()[:9], "workers", "2 of 1-2"),
        (disturbed()[:10], "workers", "0 of 1-2"),  # a world that broke has none
        (eventful(), "workers", "1 to 3"),
    ],
)
def test_a_fact_is_said_if_it_is_known(lines, fact, said):
    assert page_data(read(lines))["facts"][fact] == said


def test_of_many_workers_some_are_named():
    assert pages._some(frozenset(range(pages.MOST_IDS))).endswith(f", {pages.MOST_IDS - 1}")
    assert pages._some(frozenset(range(pages.MOST_IDS + 1200))).endswith(f", {pages.MOST_IDS - 1} and 1,200 more")


def test_the_page_is_one_file_that_may_load_nothing_and_what_a_job_says_is_never_markup():
    told = [*disturbed(), line(100, "warning", message=NASTY)]
    told = [each.replace('"killed"', json.dumps(NASTY)).replace('"j"', json.dumps(NASTY)) for each in told]
    page = report(page_data(read(told)))
    assert pages.MARK in page[:200]
    assert "default-src 'none'" in page
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)|url\(", markup)
    assert len(page.encode()) < 1_200_000, "most of it is the library that draws"
    assert len(as_json(page_data(read(storm(worlds=300, workers=200))))) < 1_000_000
    assert NASTY not in page
    assert "<script>alert" not in page + live_page(NASTY, "job", "")
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert "\u2028" not in data
    assert json.loads(data)["warnings"] == [[100.0, NASTY]]
    report(page_data(read([line(0, "job_started", job="\ud800")]))).encode()


# ---- the commands ----


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    job = create_job_dir("j")
    job.journal.write_text("\n".join(disturbed()) + "\n")
    job.status.write_text('{"job_name": "j", "phase": "succeeded", "step": 800}')
    return tmp_path


def test_a_report_is_written_into_the_current_folder_and_over_another_report(home, capsys):
    for _ in range(2):
        assert main(["report", "j"]) == 0
    assert capsys.readouterr().out == "j.html\nj.html\n"
    (home / "sent.jsonl").write_text("\n".join(disturbed())[:-10])  # by somebody
    assert main(["report", "sent.jsonl", "--out", "other.html"]) == 0
    assert "damaged lines of the journal" in (home / "other.html").read_text()
    assert sorted(path.name for path in home.iterdir()) == ["home", "j.html", "other.html", "sent.jsonl"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["report", "nobody"], "there is no job nobody"),
        (["report", "./none.jsonl"], "the journal none.jsonl can't be read: No such file or directory"),
        (["report", "j", "--out", "notes.txt"], "notes.txt is there, and is no report of a job"),
        (["report", "./notes.txt"], "notes.txt has no entry of a journal"),
        (["report", "j", "--out", "home"], "--out home is no plain file"),
        (["report", "j", "--out", "x" * 300], "can't be written: File name too long"),
        (["report", "j", "--out", "/dev/null"], "--out /dev/null is no plain file"),
        (["dashboard", "nobody"], "there is no job nobody"),
        (["dashboard", "--namespace", "lab"], "no cluster is configured"),
        (["dashboard", "--port", "PORT"], "is taken; give another, or leave it out for a free one"),
    ],
)
def test_a_mistake_is_one_line(home, capsys, argv, said):
    (home / "notes.txt").write_text("mine\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([word.replace("PORT", str(taken.getsockname()[1])) for word in argv]) == 2
    told = capsys.readouterr().err
    assert (said in told, told.count("\n"), (home / "notes.txt").read_text()) == (True, 1, "mine\n")


def test_what_is_written_aside_goes_through_no_link_and_leaves_nothing_behind(tmp_path):
    mine, target = tmp_path / "mine", tmp_path / "j.html"
    mine.write_text("mine")
    (tmp_path / f".j.html.{os.getpid()}").symlink_to(mine)
    write_aside(target, "a report")
    assert (mine.read_text(), target.read_text()) == ("mine", "a report")
    with pytest.raises(UnicodeEncodeError):
        write_aside(target, "\ud800")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["j.html", "mine"]


def test_ctrl_c_ends_the_dashboard(home, monkeypatch, capsys):
    class Pressed(LiveServer):
        def url(self, *job):
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            return super().url(*job)

    monkeypatch.setattr("elasticdl.cli.commands.look.LiveServer", Pressed)
    assert main(["dashboard", "j"]) == 0
    assert "/job/-/j/\nuntil Ctrl-C" in capsys.readouterr().out


# ---- the dashboard's server, which shows jobs to whoever knows its secret ----


class BoardOfOne:
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
def server():
    with closing(LiveServer(BoardOfOne())) as opened:
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


def test_who_knows_the_secret_sees_the_jobs_and_what_is_known_is_not_sent_again(server):
    secret = server.secret
    assert b'data-view="overview"' in ask(server, f"/{secret}/")[1]
    assert b'data-view="job"' in ask(server, "/" + server.url("lab", "a/b <i>").split("/", 3)[3])[1]
    assert {ask(server, f"/{secret}/{name}")[0] for name in ("plotly.js", "charts.js", "page.js", "page.css")} == {200}
    path = f"/{secret}/job/-/j/data.json"
    status, body, headers = ask(server, path)
    assert (status, json.loads(body)["content"]) == (200, {"x": 1})
    assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")
    assert re.match(r"default-src 'none'(?!.*unsafe-eval)", headers["Content-Security-Policy"])
    known = json.loads(body)["revision"]
    assert ask(server, f"{path}?since={known}")[0] == 204
    server.board.news = News("{}", over=True)
    status, _, headers = ask(server, f"{path}?since={known}")
    assert (status, headers["X-Job-Over"], ask(server, path, "HEAD")[1]) == (200, "1", b"")


NOT_THERE = ["/", "//", "/{wrong}/", "/{short}/", "/data.json", "/{secret}", "/{secret}/job/-/other/",
             "/{secret}/../etc/passwd", "/{secret}/page.py", "/{secret}/job/-/j/page.js", "/%00/"]  # fmt: skip
HOSTS = [("evil.example", 403), ("", 403), ("127.0.0.1:1", 403), ("localhost:{port}", 200)]  # names for this machine


def test_who_asks_otherwise_gets_nothing_and_nothing_can_be_changed(server):
    secret, at_home = server.secret, "/{secret}/"
    asked = [(path, "GET", None, 404) for path in NOT_THERE] + [(at_home, "GET", *each) for each in HOSTS]
    for path, method, host, status in [*asked, *((at_home, each, None, 501) for each in ("POST", "PUT", "DELETE"))]:
        to = path.format(secret=secret, wrong="x" * len(secret), short=secret[:-1])
        found, body, _ = ask(server, to, method, host and host.format(port=server.port))
        assert found == status, (path, method, host)
        assert status == 200 or secret.encode() not in body


def test_only_this_machine_is_listened_to_and_nothing_stays():
    opened = LiveServer(BoardOfOne())
    assert (opened.server_address[0], len(opened.secret) >= 40) == ("127.0.0.1", True)
    opened.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", opened.port))


# ---- the board: what the dashboard shows of jobs, made when it is asked for ----

HERE, THERE = ("", "j"), ("lab", "l")
RUNS, OVER = disturbed()[:10], disturbed()


class Handle:
    """A job as the board sees it; ``lines`` are its journal, or an error that reading it raises."""

    def __init__(self, lines, place=HERE, phase="running"):
        (self.namespace, self.name), self.lines, self.phase = place, lines, phase

    def journal(self):
        if isinstance(self.lines, Exception):
            raise self.lines
        yield from self.lines

    def status(self):
        return pb.JobStatus(phase=self.phase, max_workers=2) if self.phase else pb.JobStatus.FromString(b"not a status")


class Board(LiveBoard):
    """Of a time that stands. ``missing``: what the list of jobs says is missing, or raises."""

    def __init__(self, *jobs):
        self.jobs, self.now, self.missing = list(jobs), STARTED + 500.0, None
        super().__init__(self.listed, lambda: self.now)

    def listed(self, warn):
        if isinstance(self.missing, Exception):
            raise self.missing
        if self.missing:
            warn(self.missing)
        return list(self.jobs)

    def rows(self):
        """As somebody sees them who comes a while later; and what is said of them."""
        self.now += KEPT_SECONDS
        told = json.loads(self.overview().body)
        return [(row["name"], row["phase"]) for row in told["content"]], told["notice"]

    def page(self, job=HERE):
        """Likewise a job's; and whether it is over."""
        self.now += KEPT_SECONDS
        news = self.job(*job)
        told = json.loads(news.body)
        return told["content"] and told["content"]["phase"], told["notice"], news.over


def test_the_board_shows_what_there_is_when_it_is_asked_and_keeps_it_for_a_moment():
    board = Board(Handle(RUNS))
    assert (board.rows(), board.page()) == (([("j", "running")], ""), ("running", "", False))
    first = board.job(*HERE)
    board.jobs = [Handle(OVER)]  # another one of the same name
    board.now += KEPT_SECONDS - 0.1
    assert board.job(*HERE) is first
    assert board.page() == ("succeeded", "", True)
    board.jobs = [Handle(RUNS, phase="lost")]
    assert board.page() == ("lost", "", False), "as its status knows"
    with pytest.raises(KeyError):
        board.job("", "other")


def test_one_job_that_fails_and_a_cluster_that_is_away_take_nothing_from_the_others():
    here, there = Handle(OVER), Handle(OVER, THERE, phase="")
    board = Board(here, there)
    assert board.rows() == ([("j", "running"), ("l", "unreachable")], "")
    board.missing, board.jobs = "away", [here]
    assert board.rows() == ([("j", "running"), ("l", "unreachable")], "away")
    there.phase = "succeeded"
    assert board.page(THERE) == ("succeeded", "", True)
    board.missing = ValueError("odd")
    assert board.rows() == ([("j", "running"), ("l", "succeeded")], "odd")
    board.missing = None
    assert board.rows() == ([("j", "running")], "")
    with pytest.raises(KeyError):
        board.page(THERE)


def test_a_page_that_fails_says_so_and_is_tried_again():
    board = Board(job := Handle(RuntimeError()), Handle(OVER, THERE))
    for lines, phase, notice in [
        (job.lines, None, "RuntimeError"),
        (RUNS, "running", ""),
        (ValueError("it is\nodd"), None, "it is odd"),  # what was shown stays
        (OVER, "succeeded", ""),
    ]:
        job.lines = lines
        told = f"This page could not be brought up to date, and is tried again: {notice}" if notice else ""
        assert board.page() == (phase, told, phase == "succeeded")
        assert board.page(THERE) == ("succeeded", "", True)
