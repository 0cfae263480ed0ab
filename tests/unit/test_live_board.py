"""The board: what the dashboard shows of jobs, made when it is asked for."""

from __future__ import annotations

import json

import pytest
from history_kit import STARTED, disturbed

from elasticdl.cli.commands.look import KEPT_SECONDS, LiveBoard
from elasticdl.proto import elasticdl_pb2 as pb

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
