"""The report and the dashboard: what the page is given, that it holds whatever a job is called, who is shown it, and what is computed
from a journal for them."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import socket
import threading
import tracemalloc
from contextlib import closing
from copy import deepcopy

import pytest
from history_kit import SPENT, STARTED, disturbed, eventful, formed, launched, line, pause, steps, storm
from hypothesis import example, given
from hypothesis import strategies as st

from elasticdl.cli.__main__ import main
from elasticdl.cli.commands.look import KEPT_SECONDS, LiveBoard, LiveServer, News
from elasticdl.job.facts import MOST_POINTS, Curve, Facts, Point, TimeUse, WorkerPhase
from elasticdl.job.jobdir import create_job_dir, write_aside
from elasticdl.job.journal import KINDS, SpeedupRow
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.report import page as pages
from elasticdl.report.page import as_json, duration, live_page, page_data, percent, report, sentence

NASTY = "</script><script>alert(1)</script>&amp;\"'\u2028<!--"


def read(lines, until=0.0):
    return Facts("j").read(lines).conclude(until)


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


# ---- the history of a job: what is computed from its journal, whatever is in it ----


def spent(history):
    return {str(doing): round(seconds, 6) for doing, seconds in history.spent.wall.items() if seconds}


def test_each_moment_of_a_job_counts_as_what_it_was():
    history = read(eventful())
    assert spent(history) == SPENT
    paid = {str(use): round(seconds, 6) for use, seconds in history.spent.workers.items()}
    assert paid == {"productive": 79, "slow": 2, "again": 10, "evaluation": 4, "checkpoint": 2, "grow": 9, "shrink": 6,
                    "failure": 6, "waiting": 19, "starting": 12.5, "ending": 15}  # fmt: skip
    pauses = [(each.world, each.kind, each.total, each.workers) for each in history.pauses]
    assert pauses == [(2, "grow", 4, 2), (3, "shrink", 3, 0), (4, "failure", 10, 1)]
    assert history.changes == {"starting": 2, "grow": 1, "shrink": 1, "failure": 1}
    assert (history.causes, history.counts["pauses"]) == ({"drained": 1, "killed": 1}, 3)
    worlds = [(each.version, each.members, each.since - STARTED, each.until - STARTED) for each in history.worlds]
    assert worlds == [
        (1, (0, 1), 4, 25), (2, (0, 1, 2), 25, 32), (3, (1, 2), 32, 40), (4, (2, 3), 48, 70), (5, (4,), 104, 116),
    ]  # fmt: skip
    lanes = [[(str(each.phase), round(each.since - STARTED, 1)) for each in lane.spans] for lane in history.lanes]
    assert lanes[0] == [("pending", 0), ("starting", 0.1), ("warm", 2), ("training", 4), ("leaving", 30)]
    assert [lane[-1] for lane in lanes[1:]] == [("training", 4), ("leaving", 65), ("leaving", 65), ("leaving", 112)]
    assert (history.lanes[0].host, history.lanes[0].cause, history.lanes[0].code) == ("node-0", "drained", 0)
    assert (history.steps_made, history.next_worker) == (85, 5)
    assert any("was stopped and went on" in each for each in history.remarks())


# ---- journals that nobody writes ----

number = st.floats() | st.integers(-5, 10**30) | st.just("x") | st.none() | st.booleans()
near, few = st.floats(0, 100, allow_nan=False) | number, st.integers(0, 5) | number
field = {
    **dict.fromkeys(("seconds", "total", "held", "slowest", "loss", "notice", "drain"), near),
    **dict.fromkeys(("worker", "world", "step", "steps", "again", "samples", "code"), few),
    "members": st.lists(st.integers(0, 5), max_size=4) | number,
    "kind": st.sampled_from(["grow", "shrink", "failure", "odd", None]),
    "phase": st.sampled_from(["pending", "running", "waiting", "stopping", "succeeded", "data", 3]),
    "metrics": st.dictionaries(st.text(max_size=3), number, max_size=2) | number,
    "curve": st.lists(st.lists(number, max_size=4), max_size=2) | number,
    "reason": st.text(max_size=5) | number,
}
named = {"event": st.sampled_from([*KINDS, "of_tomorrow"]), "time": st.floats(0, 1000)}


@given(st.lists(st.fixed_dictionaries(named, optional=field), max_size=30), st.booleans())
@example([], True)
def test_whatever_happens_the_parts_add_up_and_time_goes_on(entries, in_order):
    if in_order:
        entries = sorted(entries, key=lambda each: each["time"])
    history = Facts()
    before = deepcopy(history.spent)
    for each in entries:
        history.read([json.dumps(each)])
        now = deepcopy(history.spent)
        for ours, past in ((now.wall, before.wall), (now.workers, before.workers)):
            assert all(ours[doing] >= past[doing] for doing in TimeUse), "what is settled never falls"
        before = now
    found = history.conclude()
    as_json(page_data(found))
    if not found.counts:
        assert found.spent.productive == 0
        return
    now, between = entries[0]["time"], 0.0
    for each in entries:
        if each["event"] == "job_started":  # the training goes on, in another job
            between += max(0.0, each["time"] - now)
        now = max(now, each["time"])
    assert sum(found.spent.wall.values()) == pytest.approx(found.until - found.began - between, abs=1e-6)
    assert min(*found.spent.wall.values(), *found.spent.workers.values()) >= -1e-9
    assert all(before.wall[doing] <= found.spent.wall[doing] + 1e-6 for doing in TimeUse)
    there = 0.0
    for lane in found.lanes:
        for span, following in itertools.pairwise(lane.spans):
            assert span.since <= span.until == following.since
        spans = [span for span in lane.spans if span.phase is not WorkerPhase.PENDING]
        there += sum((span.until or found.until) - span.since for span in spans)
    assert sum(found.spent.workers.values()) == pytest.approx(there, rel=1e-6, abs=1e-6)
    for world, following in itertools.pairwise(found.worlds):
        assert world.since <= world.until <= following.since


@pytest.mark.slow
def test_a_long_journal_takes_little_memory():
    def endless():
        for version in range(1, 4101):
            now = 10 * version
            yield formed(now, version, range(version % 50), version)
            yield from launched(version, now)
            yield line(now + 3, "worker_left", worker=version, cause="crashed", reason="x" * 50, code=1)
            yield pause(now + 4, version, "grow", 0.1)
            yield steps(now + 5, version, 1, world=version)
            yield line(now + 6, f"of_tomorrow_{version}")
            yield line(now + 6, "warning", message="x" * 100)

    tracemalloc.start()
    history = read(endless())
    assert tracemalloc.get_traced_memory()[1] < 40e6
    tracemalloc.stop()
    assert history.counts["world_formed"] == history.counts["pauses"] == 4100
    assert any("only the newest" in remark for remark in history.remarks())


def test_a_curve_has_one_resolution_and_loses_no_sample():
    curve = Curve()
    for step in range(20_000):
        loss = None if step == 7 else float(step)
        curve.add(Point(step, 1, 1, 2, loss, 0.1, 0.5, 0, 0.0, time=float(step), workers=3))
    points = curve.points
    assert len(points) < MOST_POINTS
    assert sum(point.samples for point in points) == 40_000
    assert sum(point.seconds for point in points) == 10_000
    assert {point.steps for point in points[:-1]} == {8}
    assert points[1].loss == pytest.approx(sum(range(8, 16)) / 8)


# ---- journals with numbers ----

BEGUN = [
    line(0, "job_started", job="j", workers="1-4"),
    *sorted([*launched(0, 0), *launched(1, 0)], key=lambda text: json.loads(text)["time"]),
    formed(4, 1, [0, 1], 0),
    line(4, "phase", phase="running", reason=""),
]
START = [*BEGUN, steps(5, 1, 1, seconds=0)]
TRAINED = steps(10, 50, 49, seconds=5)  # after five seconds
STEPS_OVER = line(15, "steps_over", step=50, seconds=5)


def phase(time, name):
    return line(time, "phase", phase=name, reason="why")


def broken(time):
    return line(time, "world_broken", world=1, reason="killed")


def finished(time, phase="succeeded"):
    return line(time, "job_finished", phase=phase, reason="done", steps=9)


@pytest.mark.parametrize(
    ("lines", "until", "wanted"),
    [
        # Before its pause is known, all from the break on is one; with slow steps it begins later.
        ([steps(80, 10, 9, seconds=75), broken(80), formed(82, 2, [0], 10, seconds=2), pause(93, 2, "failure", 3),
          steps(93, 11, 1, world=2, seconds=10)], 100, {"productive": 92, "failure": 3}),
        ([broken(60), formed(62, 2, [2], 1)], 90, {"productive": 55, "failure": 30}),
        # A world that a new master finds has trained meanwhile.
        ([steps(20, 90, 89), line(30, "master_restarted", world=2, members=[0, 1, 2], missing=[], seconds=8),
          steps(31, 200, 110, world=2)], 40, {"productive": 35}),
        # Nothing takes more than was trained by then; the checkpoint of a stop is part of the end.
        ([line(8, "evaluation", step=9, seconds=1e9)], 10, {"evaluation": 3, "productive": 2}),
        ([TRAINED, phase(10, "stopping"), line(14, "checkpoint", step=50, held=4.5), finished(15, "stopped")],
         0, {"productive": 4.5, "checkpoint": 0.5, "ending": 5}),
        # After the last step of one, others may have work left, for which the job waits, or recovers.
        ([TRAINED, phase(12, "waiting"), STEPS_OVER], 20, {"productive": 5, "waiting": 8, "ending": 2}),
        ([TRAINED, broken(12), STEPS_OVER, formed(20, 2, [0], 50), steps(21, 60, 10, world=2, seconds=1)],
         21, {"productive": 5 + 1, "failure": 5, "ending": 5}),
    ],
)  # fmt: skip
def test_where_the_time_went(lines, until, wanted):
    history = read([*START, *lines], until and STARTED + until)
    assert spent(history) == pytest.approx({"starting": 5, **wanted})
    assert spent(read(BEGUN, STARTED + 50)) == {"starting": 50}, "no step was made"


def test_the_time_between_a_job_and_the_next_one_is_no_pause():
    later = [line(3600, "job_started", job="j", workers="1-4"), formed(3604, 1, [2], 50), steps(3605, 51, 1, seconds=0)]
    history = read([*START, TRAINED, broken(12), finished(15, "stopped"), *later])
    assert (history.longest_pause, history.changes["failure"]) == (0, 0)


# ---- what else is told ----


def test_what_is_damaged_or_unknown_is_left_out_and_remarked():
    lines = ["\x00", "{", "[]", '{"event": 3, "time": 1}', '{"event": "x"}', '{"event": "x", "time": 1e999}', ""]
    odd = [line(6, "of_tomorrow", worker="?"), line(7, "pause", total="x"), line(7, "steps", steps=[], loss="nan")]
    history = read([*START, *lines, *odd, line(5.5, "warning", message="late")], STARTED + 10)
    assert spent(history) == {"starting": 5, "productive": 5}
    said = " ".join(history.remarks())
    assert all(part in said for part in ("left out: 6", "does not know: 1"))
    cut = read(START[7:], STARTED + 10)
    assert "beginning" in next(cut.remarks())
    assert sum(cut.spent.wall.values()) == pytest.approx(cut.until - cut.began) == pytest.approx(6)


def test_advice_and_trouble_are_kept_as_they_come():
    row = {"workers": 2, "speedup": 1.8, "measured": True}
    lines = [*START, line(6, "collective", worker=0, engine="gloo"),
             line(6, "advice", text="4 would do", curve=[row, [1], {"workers": 3}]),
             line(7, "worker_stuck", worker=0, host="h", seconds=31, where="train.py:31 in load", stack=["a"]),
             line(8, "worker_recovered", worker=0), line(9, "decision", workers=2, reason="enough")]  # fmt: skip
    history = read(lines)
    assert (history.advice, history.speedup) == ("4 would do", [SpeedupRow(**row)])
    assert (history.target, history.decision, history.wanted) == (2, "enough", "1-4")
    assert history.collective == read([*lines, finished(20)]).collective == "gloo"  # as the end of an older version
    told = {"collective": "horovod", "compared": 8, "compared_workers": 2}
    over = read([*lines, line(20, "job_finished", phase="succeeded", steps=9, **told)])
    assert (over.collective, over.compared) == ("horovod", (8, 2))
    assert [mark.event for mark in history.marks] == ["phase", "worker_stuck", "worker_recovered", "decision"]
