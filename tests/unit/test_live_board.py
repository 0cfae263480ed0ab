"""The board: what the dashboard shows of jobs, as it is read for it."""

from __future__ import annotations

import json
import math
import threading
import time
from contextlib import closing

import pytest
from history_kit import STARTED, disturbed
from test_dashboard import soon

from elasticdl.cli.live_board import LiveBoard, _age_drawn, with_status
from elasticdl.cli.local.folder_job import FileFeed
from elasticdl.job.facts import Facts
from elasticdl.proto import elasticdl_pb2 as pb


class Handle:
    """A job of this machine, as the board sees it."""

    namespace, name = "", "j"

    def __init__(self, path, **told):
        self.path, self.told = path, told

    def feed(self):
        return FileFeed(self.path)

    def status(self):
        return pb.JobStatus(phase="running", max_workers=2, **self.told)


def test_the_board_reads_what_is_asked_for_as_it_grows(tmp_path):
    path = tmp_path / "journal.jsonl"
    lines = disturbed()
    path.write_text("\n".join(lines[:10]) + "\n")
    with closing(LiveBoard(lambda warn: warn("the cluster is away") or [Handle(path)])) as board:
        overview = json.loads(soon(board.overview).body)
        assert (overview["content"][0]["name"], overview["notice"]) == ("j", "the cluster is away")
        first = soon(lambda: board.job("", "j"))
        assert json.loads(first.body)["content"]["phase"] == "running"
        with path.open("a") as file:
            file.write("\n".join(lines[10:]) + "\n")
        last = soon(lambda: (news := board.job("", "j")).over and news)
        assert json.loads(last.body)["content"]["facts"]["step"] == "800"
        with pytest.raises(KeyError):
            board.job("", "other")
    assert not [thread for thread in threading.enumerate() if "_keep" in thread.name]


MONTH = 30 * 86400.0


@pytest.mark.parametrize(("age", "seconds"), [(300.0, 2.0), (3600.0, 11.0), (MONTH, 11.0)])
def test_a_page_of_a_job_that_tells_nothing_new_is_drawn_anew_as_time_passes(tmp_path, monkeypatch, age, seconds):
    monkeypatch.setattr("elasticdl.cli.live_board.LOOK_SECONDS", 0.02)
    path, now = tmp_path / "journal.jsonl", STARTED + age
    path.write_text("\n".join(disturbed()[:10]) + "\n")
    with closing(LiveBoard(lambda warn: [Handle(path)], lambda: now)) as board:
        soon(board.overview)
        first = soon(lambda: board.job("", "j"))
        now += seconds
        later = soon(lambda: (news := board.job("", "j")) is not first and news)
    lengths = [json.loads(news.body)["content"]["length"] for news in (first, later)]
    assert lengths[1] == lengths[0] + seconds


def test_a_page_is_not_drawn_with_every_look():
    drawn = [_age_drawn(age) for age in range(100_000)]
    assert drawn == sorted(drawn)
    assert len(set(drawn[:3000])) < 300 * 8.1  # the logarithm of 3000
    assert len(set(drawn[3000:])) == pytest.approx(97_000 / 10, abs=2)


def test_a_page_tells_the_step_of_a_long_job_before_its_journal_does(tmp_path):
    path, now = tmp_path / "journal.jsonl", STARTED + MONTH
    path.write_text("\n".join(disturbed()[:9]) + "\n")
    told = {"step": 9_000, "loss": 0.25, "samples": 32 * 9_000, "samples_per_second": 640.0, "world_version": 1}
    with closing(LiveBoard(lambda warn: [Handle(path, **told)], lambda: now)) as board:
        soon(board.overview)
        facts = json.loads(soon(lambda: board.job("", "j")).body)["content"]["facts"]
    assert (facts["step"], facts["loss"], facts["samples/s"]) == ("9,000", "0.25", "640")


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ({"step": 702, "world_version": 2, "loss": 0.5, "samples": 9, "samples_per_second": 8.0}, (702, 0.5, 8.0)),
        ({"step": 702, "world_version": 2, "loss": 0.5, "samples": 0}, (702, None, 0.0)),
        ({"step": 702, "world_version": 2, "loss": math.nan, "samples": 9}, (702, None, 0.0)),
        ({"step": 701, "world_version": 2, "loss": 0.5, "samples": 9}, (701, 1.0, 256.0)),
        ({"step": 900, "world_version": 1, "loss": 0.5, "samples": 9}, (701, 1.0, 256.0)),
    ],
)
def test_of_journal_and_status_the_newer_one_tells_the_step(told, wanted):
    history = Facts()
    history.read(disturbed()[:-1])
    found = with_status(history, pb.JobStatus(phase="running", **told), STARTED + 95)
    assert (found.step, found.loss, found.rate) == wanted


class Lab(Handle):
    """A job of a cluster, with files that make no sense."""

    namespace, name = "lab", "l"

    def status(self):
        raise ValueError("not a status")


def test_one_job_that_fails_and_a_cluster_that_is_away_take_nothing_from_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("elasticdl.cli.live_board.LOOK_SECONDS", 0.02)
    (tmp_path / "journal.jsonl").write_text("\n".join(disturbed()) + "\n")
    here, there, away = Handle(tmp_path / "journal.jsonl"), Lab(tmp_path / "journal.jsonl"), threading.Event()
    listed = {False: [here, there], True: [here]}
    with closing(LiveBoard(lambda warn: (away.is_set() and warn("away")) or listed[away.is_set()])) as board:
        rows = json.loads(soon(board.overview).body)["content"]
        assert [(row["name"], row["phase"]) for row in rows] == [("j", "running"), ("l", "unreachable")]
        away.set()
        soon(lambda: json.loads(board.overview().body)["notice"] == "away")
        assert soon(lambda: board.job("lab", "l")).over
        away.clear()
        listed[False] = [here]
        soon(lambda: not json.loads(board.overview().body)["notice"])
        with pytest.raises(KeyError):
            board.job("lab", "l")
        listed[False] = [here, there]
        soon(lambda: len(json.loads(board.overview().body)["content"]) == 2)


# ---- journals that come late, and pages that fail ----


class Told:
    """A feed that tells one part of the journal after the other; a part that is an error is raised."""

    def __init__(self, parts):
        self.parts, self.begun = parts, False

    def read(self):
        part = self.parts.pop(0) if self.parts else []
        if isinstance(part, Exception):
            raise part
        anew, self.begun = bool(part) and not self.begun, self.begun or bool(part)
        return anew, part

    def close(self):
        raise RuntimeError("can't be closed")


class Ended:
    """A job of a cluster that is over; each of ``journals`` is what a feed tells."""

    namespace, name = "lab", "l"

    def __init__(self, *journals, **told):
        self.journals, self.told = list(journals), told

    def feed(self):
        journal = self.journals.pop(0)
        if isinstance(journal, Exception):
            raise journal
        return Told(journal)

    def status(self):
        return pb.JobStatus(**{"phase": "succeeded", **self.told})


@pytest.fixture
def now(monkeypatch):
    """A clock that stands, as [seconds since the epoch]; looks come one after the other."""
    monkeypatch.setattr("elasticdl.cli.live_board.LOOK_SECONDS", 0.02)
    return [STARTED + 500.0]


def look(board, condition=lambda news: True, job=("lab", "l")):
    """The page's news, once they are so; and what they say."""
    soon(board.overview)
    news = soon(lambda: (found := board.job(*job)) and condition(found) and found)
    return news, json.loads(news.body)


def test_a_page_waits_for_a_journal_that_has_not_begun(now):
    parts = [[], [], []]
    with closing(LiveBoard(lambda warn: [Ended(parts)], lambda: now[0])) as board:
        soon(board.overview)
        assert board.job("lab", "l") is None
        soon(lambda: not parts)
        time.sleep(0.2)
        assert board.job("lab", "l") is None, "nothing is known of it, so it is not said that nothing has happened"
        parts += [disturbed()]
        news, told = look(board)
    assert (news.over, told["content"]["began"], told["content"]["facts"]["step"]) == (True, STARTED, "800")


def test_a_page_of_which_the_journal_has_not_told_the_end_is_asked_for_as_if_it_went_on(now):
    """Else a page of a job that is over would show a part of it for long."""
    parts = [disturbed()[:10]]
    with closing(LiveBoard(lambda warn: [Ended(parts)], lambda: now[0])) as board:
        news, told = look(board)
        assert (news.over, told["content"]["over"]) == (False, True)
        parts += [disturbed()[10:]]
        assert look(board, lambda news: news.over)[1]["content"]["facts"]["step"] == "800"


def test_a_journal_that_tells_nothing_is_shown_as_one_after_a_while(now):
    with closing(LiveBoard(lambda warn: [Ended([], elapsed=60)], lambda: now[0])) as board:
        soon(board.overview)
        assert board.job("lab", "l") is None
        time.sleep(0.2)
        assert board.job("lab", "l") is None
        now[0] += 6
        news, told = look(board)
    content = told["content"]
    assert (news.over, content["began"], content["length"]) == (False, now[0] - 60, 60)
    assert content["sentence"] == "Its journal tells nothing."


@pytest.mark.parametrize(
    ("status", "age"),
    [
        (None, 0),
        (pb.JobStatus(phase="failed", elapsed=30), 30),
        (pb.JobStatus(phase="lost"), 0),
        (pb.JobStatus(phase="pending", elapsed=30), 30),
        (pb.JobStatus(phase="failed", elapsed=math.nan), 0),
        (pb.JobStatus(phase="failed", elapsed=-1), 0),
        (pb.JobStatus(phase="failed", elapsed=1e300), STARTED),
    ],
)
def test_a_history_without_entries_does_not_begin_in_1970(status, age):
    found = with_status(Facts("j"), status, STARTED)
    assert (found.began, found.until) == (STARTED - age, STARTED)


def test_a_page_that_fails_says_so_and_takes_nothing_from_the_others(tmp_path, now):
    path = tmp_path / "journal.jsonl"
    path.write_text("\n".join(disturbed()[:9]) + "\n")
    parts = []
    bad = Ended([disturbed()[:10], ValueError("it is\nodd")], parts, phase="running")
    with closing(LiveBoard(lambda warn: [bad, Handle(path)], lambda: now[0])) as board:
        _, told = look(board, lambda news: b'"notice":""' not in news.body)
        assert told["notice"] == "This page could not be brought up to date, and is tried again: it is odd"
        assert told["content"]["worlds"], "what was shown stays"
        look(board, job=("", "j"))
        with path.open("a") as file:
            file.write("\n".join(disturbed()[9:]) + "\n")
        look(board, lambda news: news.over, ("", "j"))
        now[0] += 31
        soon(lambda: not bad.journals)
        time.sleep(0.2)
        assert look(board)[1]["notice"], "until the journal has begun once more"
        parts += [disturbed()]
        _, told = look(board, lambda news: news.over)
        assert (told["notice"], told["content"]["facts"]["step"]) == ("", "800")


def test_a_page_that_was_never_drawn_says_why(now):
    with closing(LiveBoard(lambda warn: [Ended(RuntimeError(), [disturbed()])], lambda: now[0])) as board:
        news, told = look(board)
        assert (told["content"], news.over) == (None, False)
        assert told["notice"].endswith("RuntimeError")
        now[0] += 31
        assert look(board, lambda news: news.over)[1]["notice"] == ""


def test_a_list_that_fails_says_so_and_goes_on(now):
    listed = [ValueError("odd"), []]

    def jobs(warn):
        if isinstance(found := listed.pop(0) if listed else [], Exception):
            raise found
        return found

    with closing(LiveBoard(jobs, lambda: now[0])) as board:
        assert json.loads(soon(board.overview).body)["notice"] == "odd"
        soon(lambda: json.loads(board.overview().body)["notice"] == "")
