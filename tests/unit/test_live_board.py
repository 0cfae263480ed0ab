"""The board: what the dashboard shows of jobs, as it is read for it."""

from __future__ import annotations

import json
import math
import threading
import time
from functools import partial

import pytest
from history_kit import STARTED, disturbed
from test_dashboard import soon

from elasticdl.cli.live_board import LiveBoard, _age_drawn, with_status
from elasticdl.job.facts import Facts
from elasticdl.proto import elasticdl_pb2 as pb

MONTH = 30 * 86400.0
HERE, THERE = ("", "j"), ("lab", "l")


class Feed:
    """It tells one part of the journal after the other; a part that is an error is raised."""

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


class Handle:
    """A job as the board sees it; each of ``journals`` is what a feed tells."""

    def __init__(self, *journals, place=HERE, **told):
        (self.namespace, self.name), self.journals, self.told = place, list(journals), told

    def feed(self, *, earlier):
        journal = self.journals.pop(0)
        if isinstance(journal, Exception):
            raise journal
        return Feed(journal)

    def status(self):
        return pb.JobStatus(**{"phase": "running", "max_workers": 2, **self.told})


class Look:
    """At a board; looks come one after the other, and its clock stands."""

    def __init__(self):
        self.now, self.jobs, self.board = STARTED + 500.0, [], None

    def at(self, *jobs, now=None, listed=None):
        self.now = now or self.now
        self.board = LiveBoard(listed or (lambda warn: list(jobs)), lambda: self.now)
        self.overview()
        return self

    def overview(self):
        return json.loads(soon(self.board.overview).body)

    def page(self, condition=lambda news: True, job=THERE):
        """Its news, once they are so; and what they say."""
        news = soon(lambda: (found := self.board.job(*job)) and condition(found) and found)
        return news, json.loads(news.body)

    def facts(self, **more):
        return self.page(**more)[1]["content"]["facts"]


@pytest.fixture
def look(monkeypatch):
    monkeypatch.setattr("elasticdl.cli.live_board.LOOK_SECONDS", 0.02)
    it = Look()
    yield it
    it.board.close()
    assert not [thread for thread in threading.enumerate() if "_keep" in thread.name]


Ended = partial(Handle, place=THERE, phase="succeeded")  # a job of a cluster that is over


def over(news):
    return news.over


def test_the_board_reads_what_is_asked_for_as_it_grows(look):
    parts = [disturbed()[:10]]
    job = Handle(parts)
    look.at(listed=lambda warn: warn("the cluster is away") or [job])
    overview = look.overview()
    assert (overview["content"][0]["name"], overview["notice"]) == ("j", "the cluster is away")
    assert look.page(job=HERE)[1]["content"]["phase"] == "running"
    parts.append(disturbed()[10:])
    assert look.facts(condition=over, job=HERE)["step"] == "800"
    with pytest.raises(KeyError):
        look.board.job("", "other")


@pytest.mark.parametrize(("age", "seconds"), [(300.0, 2.0), (MONTH, 11.0)])
def test_a_page_of_a_job_that_tells_nothing_new_is_drawn_anew_as_time_passes(look, age, seconds):
    look.at(Handle([disturbed()[:10]]), now=STARTED + age)
    first, told = look.page(job=HERE)
    look.now += seconds
    _, later = look.page(lambda news: news is not first, HERE)
    assert later["content"]["length"] == told["content"]["length"] + seconds


def test_a_page_is_not_drawn_with_every_look():
    drawn = [_age_drawn(age) for age in range(100_000)]
    assert drawn == sorted(drawn)
    assert len(set(drawn[:3000])) < 300 * 8.1  # the logarithm of 3000
    assert len(set(drawn[3000:])) == pytest.approx(97_000 / 10, abs=2)


def test_a_page_tells_the_step_of_a_long_job_before_its_journal_does(look):
    told = {"step": 9_000, "loss": 0.25, "samples": 32 * 9_000, "samples_per_second": 640.0, "world_version": 1}
    facts = look.at(Handle([disturbed()[:9]], **told), now=STARTED + MONTH).facts(job=HERE)
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


def test_one_job_that_fails_and_a_cluster_that_is_away_take_nothing_from_the_others(look):
    here, there, away = Handle([disturbed()]), Ended([disturbed()], [disturbed()]), threading.Event()
    there.status = lambda: pb.JobStatus.FromString(b"not a status")
    jobs = [here, there]
    look.at(listed=lambda warn: (warn("away") or [here]) if away.is_set() else list(jobs))
    rows = look.overview()["content"]
    assert [(row["name"], row["phase"]) for row in rows] == [("j", "running"), ("l", "unreachable")]
    away.set()
    soon(lambda: look.overview()["notice"] == "away")
    assert look.page(over)
    jobs.pop()
    away.clear()
    soon(lambda: not look.overview()["notice"])
    with pytest.raises(KeyError):
        look.board.job(*THERE)
    jobs.append(there)
    soon(lambda: len(look.overview()["content"]) == 2)


# ---- journals that come late, and pages that fail ----


def test_a_page_waits_for_a_journal_that_has_not_begun_and_a_part_of_one_is_asked_for_as_if_it_went_on(look):
    """Nothing is known of it, so it is not said that nothing has happened; else a part would be shown for long."""
    parts = [[], [], []]
    look.at(Ended(parts))
    assert look.board.job(*THERE) is None
    soon(lambda: not parts)
    assert look.board.job(*THERE) is None
    parts.append(disturbed()[:10])
    news, told = look.page()
    assert (news.over, told["content"]["over"], told["content"]["began"]) == (False, True, STARTED)
    parts.append(disturbed()[10:])
    assert look.facts(condition=over)["step"] == "800"


def test_a_journal_that_tells_nothing_is_shown_as_one_after_a_while(look):
    look.at(Ended([], elapsed=60))
    assert look.board.job(*THERE) is None
    time.sleep(0.2)
    assert look.board.job(*THERE) is None
    look.now += 6
    news, told = look.page()
    content = told["content"]
    assert (news.over, content["began"], content["length"]) == (False, look.now - 60, 60)
    assert content["sentence"] == "Its journal tells nothing."


@pytest.mark.parametrize(
    ("status", "age"),
    [
        (None, 0),
        (pb.JobStatus(phase="failed", elapsed=30), 30),
        (pb.JobStatus(phase="lost"), 0),
        (pb.JobStatus(phase="failed", elapsed=math.nan), 0),
        (pb.JobStatus(phase="failed", elapsed=-1), 0),
        (pb.JobStatus(phase="failed", elapsed=1e300), STARTED),
    ],
)
def test_a_history_without_entries_does_not_begin_in_1970(status, age):
    found = with_status(Facts("j"), status, STARTED)
    assert (found.began, found.until) == (STARTED - age, STARTED)


def test_a_page_that_fails_says_so_and_takes_nothing_from_the_others(look):
    parts, others = [], [disturbed()[:9]]
    bad = Ended([disturbed()[:10], ValueError("it is\nodd")], parts, phase="running")
    look.at(bad, Handle(others))
    _, told = look.page(lambda news: b'"notice":""' not in news.body)
    assert told["notice"] == "This page could not be brought up to date, and is tried again: it is odd"
    assert told["content"]["worlds"], "what was shown stays"
    look.page(job=HERE)
    others.append(disturbed()[9:])
    look.page(over, HERE)
    look.now += 31
    soon(lambda: not bad.journals)
    assert look.page()[1]["notice"], "until the journal has begun once more"
    parts.append(disturbed())
    _, told = look.page(over)
    assert (told["notice"], told["content"]["facts"]["step"]) == ("", "800")


def test_a_page_that_was_never_drawn_says_why(look):
    news, told = look.at(Ended(RuntimeError(), [disturbed()])).page()
    assert (told["content"], news.over) == (None, False)
    assert told["notice"].endswith("RuntimeError")
    look.now += 31
    assert look.page(over)[1]["notice"] == ""


def test_masters_of_the_list_are_asked_at_the_same_time(look):
    both = threading.Barrier(2)

    class Slow(Handle):
        def status(self):
            both.wait(30.0)
            return super().status()

    look.at(Slow(), Slow(place=THERE))
    assert [(row["name"], row["phase"]) for row in look.overview()["content"]] == [("j", "running"), ("l", "running")]


def test_a_list_that_fails_says_so_and_goes_on(look):
    listed = [ValueError("odd"), []]

    def jobs(warn):
        if isinstance(found := listed.pop(0) if listed else [], Exception):
            raise found
        return found

    look.at(listed=jobs)
    soon(lambda: look.overview()["notice"] == "")
