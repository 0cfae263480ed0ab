"""The board: what the dashboard shows of jobs, made when it is asked for."""

from __future__ import annotations

import json
import threading
from functools import partial

import pytest
from history_kit import STARTED, disturbed

from elasticdl.cli.commands.look import KEPT_SECONDS, LiveBoard
from elasticdl.proto import elasticdl_pb2 as pb

HERE, THERE = ("", "j"), ("lab", "l")


class Handle:
    """A job as the board sees it; ``journal`` is what it has, or an error that reading it raises."""

    def __init__(self, journal=(), place=HERE, **told):
        (self.namespace, self.name), self.lines, self.told = place, journal, told
        self.read = 0

    def journal(self):
        self.read += 1
        if isinstance(self.lines, Exception):
            raise self.lines
        yield from self.lines

    def status(self):
        return pb.JobStatus(**{"phase": "running", "max_workers": 2, **self.told})


class Look:
    """At a board, whose clock stands."""

    def __init__(self):
        self.now, self.board = STARTED + 500.0, None

    def at(self, *jobs, listed=None):
        self.board = LiveBoard(listed or (lambda warn: list(jobs)), lambda: self.now)
        return self

    def overview(self):
        self.now += KEPT_SECONDS
        return json.loads(self.board.overview().body)

    def page(self, job=THERE):
        """Its news, as somebody sees them who comes a while later; and what they say."""
        self.now += KEPT_SECONDS
        news = self.board.job(*job)
        return news, json.loads(news.body)


@pytest.fixture
def look():
    return Look()


Ended = partial(Handle, place=THERE, phase="succeeded")  # a job of a cluster that is over


def test_the_board_shows_what_there_is_when_it_is_asked(look):
    job = Handle(disturbed()[:10])
    look.at(listed=lambda warn: warn("the cluster is away") or [job])
    overview = look.overview()
    assert (overview["content"][0]["name"], overview["notice"]) == ("j", "the cluster is away")
    assert look.page(HERE)[1]["content"]["phase"] == "running"
    job.lines = disturbed()
    news, told = look.page(HERE)
    assert (news.over, told["content"]["facts"]["step"]) == (True, "800")
    with pytest.raises(KeyError):
        look.board.job("", "other")


def test_a_page_is_kept_for_a_moment(look):
    job = Handle(disturbed()[:10])
    first = look.at(job).page(HERE)[0]
    look.now += KEPT_SECONDS - 0.1
    assert look.board.job(*HERE) is first
    look.now += 0.1
    second = look.board.job(*HERE)
    assert second.revision != first.revision
    assert job.read == 2


def test_a_page_shows_the_job_that_has_the_name_now(look):
    """Another one of the same name, between two looks."""
    jobs = [Handle(disturbed()[:10])]
    look.at(listed=lambda warn: list(jobs))
    assert look.page(HERE)[1]["content"]["phase"] == "running"
    jobs[:] = [Handle(disturbed())]
    assert look.page(HERE)[0].over
    assert jobs[0].read == 1


def test_one_job_that_fails_and_a_cluster_that_is_away_take_nothing_from_the_others(look):
    here, there, away = Handle(disturbed()), Ended(disturbed()), threading.Event()
    there.status = lambda: pb.JobStatus.FromString(b"not a status")
    jobs = [here, there]
    look.at(listed=lambda warn: (warn("away") or [here]) if away.is_set() else list(jobs))
    rows = look.overview()["content"]
    assert [(row["name"], row["phase"]) for row in rows] == [("j", "running"), ("l", "unreachable")]
    away.set()
    overview = look.overview()
    assert (overview["notice"], len(overview["content"])) == ("away", 2)
    there.status = lambda: pb.JobStatus(phase="succeeded")
    assert look.page()[0].over
    jobs.pop()
    away.clear()
    assert not look.overview()["notice"]
    with pytest.raises(KeyError):
        look.board.job(*THERE)
    jobs.append(there)
    assert len(look.overview()["content"]) == 2


def test_a_page_or_a_list_that_fails_says_so_and_takes_nothing_from_the_others(look):
    bad, listed = Ended(RuntimeError(), phase="running"), [ValueError("odd")]

    def jobs(warn):
        if listed:
            raise listed.pop()
        return [bad, Handle(disturbed())]

    assert look.at(listed=jobs).overview()["notice"] == "odd"
    assert look.overview()["notice"] == ""
    could_not = "This page could not be brought up to date, and is tried again: "
    # A page that was never drawn, one that is, the same once it fails, and again.
    for lines, notice in [
        (bad.lines, f"{could_not}RuntimeError"),
        (disturbed()[:10], ""),
        (ValueError("it is\nodd"), f"{could_not}it is odd"),
        (disturbed(), ""),
    ]:
        bad.lines = lines
        news, told = look.page()
        assert told["notice"] == notice
        assert (told["content"] is None) == bool(notice), "what was shown stays"
        assert not (news.over and notice)
        assert look.page(HERE)[0].over
    assert told["content"]["facts"]["step"] == "800"
