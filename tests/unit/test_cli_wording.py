"""What people read: the panel, the plain lines, the summary."""

from __future__ import annotations

import io
import math
import re

import pytest
from history_kit import eventful
from rich.console import Console

from elasticdl.cli import screens as wording
from elasticdl.cli.follow import Prints, show_entry
from elasticdl.cli.pod_logs import PodPrinters
from elasticdl.cli.screens import Screen, render
from elasticdl.job.facts import Facts
from elasticdl.job.journal import Seldom, dump_entry, news
from elasticdl.proto import elasticdl_pb2 as pb


def status_of(**fields):
    workers = [
        pb.WorkerStatus(worker_id=0, state="member", rank=1, host="here", pid=10),
        pb.WorkerStatus(worker_id=2, state="member", rank=0, host="here", pid=12),
        pb.WorkerStatus(worker_id=3, state="pending", rank=-1, reason="no slot is free"),
    ]
    about = {"job_name": "brave-otter-42", "phase": "running", "workers": workers, "min_workers": 2, "max_workers": 4}
    progress = {"epoch": 1, "total_epochs": 4, "step": 1250, "total_steps": 5000, "loss": 0.12345, "samples": 80000}
    times = {"samples_per_second": 4321.0, "time_left": 90.0, "elapsed": 30.0}
    return pb.JobStatus(**{**about, **progress, **times, **fields})


def drawn(status, age=0.0):
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(render(status, age))
    return console.export_text()


def shown(*entries):
    """The lines that a plain screen shows of these entries."""
    screen, once, seldom = Screen((lines := []).append, log_loss_steps=100), wording.Once(), Seldom()
    for entry in entries:
        show_entry(dump_entry(entry), screen, once, seldom, lambda entry: None)
    return lines


def found(*journal):
    return Facts().read(map(dump_entry, journal)).conclude()


def test_the_panel_shows_progress_workers_and_why_they_changed():
    """Text from outside is never taken for markup."""
    panel = drawn(status_of(last_change="[/b] failed [red]"), age=10)
    parts = ["brave-otter-42 · running", "epoch 2/4", "step 1,250/5,000", "loss 0.1235", "4,321 samples/s"]
    parts += ["elapsed 0:00:40", "left 0:01:20", "no slot is free", "2 of 2-4 workers train"]
    parts += ["last change: [/b] failed [red]"]
    assert [part for part in parts if part not in panel] == []
    assert "0 of 2-4 workers train" in drawn(status_of(phase="waiting"))
    row = next(line.split() for line in panel.splitlines() if " here " in line)
    assert row[1:6] == ["0", "trains", "1", "here", "10"]


def test_plain_lines_come_each_so_many_steps_and_tell_once_what_workers_wait_for():
    screen = Screen((lines := []).append, log_loss_steps=100)
    for step in (0, 1, 99, 100, 101, 350, 360):
        screen.show(status_of(step=step))
    untold = status_of(samples=0, loss=0.0, samples_per_second=0.0)
    assert ("loss -" in drawn(untold), "loss" in wording.progress_line(untold)) == (True, False), "it is not made up"
    whole = "epoch 2/4, step 100/5,000, loss 0.1235, 4,321 samples/s, 2 workers, elapsed 0:00:30, left 0:01:30"
    assert lines == ["worker 3 waits: no slot is free", whole, whole.replace("100/", "350/")]
    for why in ("no node", "no node", "quota"):
        workers = [pb.WorkerStatus(worker_id=n, state="pending", reason=why) for n in range(2)]
        screen.show(pb.JobStatus(phase="pending", workers=workers))
    assert lines[3:] == ["workers 0, 1 wait: no node", "workers 0, 1 wait: quota"]


FORMED = {"world": 1, "members": [0], "reason": "ready"}
SLOW = {"worker": 1, "host": "b", "phase": "update", "factor": 283.32, "seconds": 0.100616}
LEFT = {"worker": 1, "cause": "finished", "reason": "finished", "code": 0}
STUCK = {"worker": 3, "host": "node-b", "why": "stuck", "seconds": 31.2}


@pytest.mark.parametrize(
    ("event", "fields", "told"),
    [
        ("scale_requested", {"workers": "1"}, "asked for 1 worker"),
        ("world_formed", {**FORMED, "step": 0}, "world 1: 1 worker (0): ready"),
        ("world_formed", {**FORMED, "step": 40}, "world 1: 1 worker (0) from step 40: ready"),
        ("worker_slow", SLOW, "worker 1 on b is slow: 283x the others (update), who wait 0.1 s a step for it"),
        ("decision", {"workers": 2, "reason": "stays at 2: ..."}, "scaling: stays at 2: ..."),
        ("worker_left", LEFT, None),  # as it should
        ("worker_left", {**LEFT, "reason": "SIGKILL", "code": -9}, "worker 1 left: SIGKILL"),
        ("worker_stuck", {**STUCK, "where": "a.py:3 in f"}, "worker 3 on node-b: stuck for 31 s, at a.py:3 in f"),
        ("worker_stuck", {**STUCK, "state": "does not run"}, "worker 3 on node-b: stuck for 31 s, does not run"),
    ],
)
def test_news_are_said_in_words(event, fields, told):
    assert news({"time": 0, "event": event, **fields}) == told


def test_a_long_reason_stands_once_in_the_panel_and_among_news_with_whatever_numbers():
    missing = "crashed: exit code 1: train.py:3: RuntimeError: the folder of data is not there; it has to be mounted"
    again = "crashed: exit code 1: train.py:3: RuntimeError: the folder o... (as above)"
    workers = [pb.WorkerStatus(worker_id=n, state="pending", reason=f"{missing}; worker-{n}.log") for n in range(3)]
    status = status_of(workers=workers, max_workers=3, reason=f"3 in a row, the last {missing}; worker-2.log; goes on")
    panel = re.sub(r"[\s│]+", " ", drawn(status))
    assert (panel.count("has to be mounted"), panel.count("(as above)")) == (1, 3)
    reasons = {n: f"{missing}; {n}.log" for n in (1, 22)}
    left = [{"time": n, "event": "worker_left", "worker": n, "reason": why, "code": 1} for n, why in reasons.items()]
    warning = {"time": 3, "event": "warning", "message": f"2 in a row: {reasons[22]}; the job goes on"}
    told = [f"1 left: {reasons[1]}", f"22 left: {again}", f"warning: 2 in a row: {again}; the job goes on"]
    assert [line.removeprefix("worker ") for line in shown(*left, warning)] == told


def test_of_short_epochs_a_screen_shows_one_line_in_ten_seconds_and_what_is_rare_always():
    """Also after a new master whose clock is behind."""
    times = enumerate([100.0, 100.1, 109.9, 110.0, 119.0, 90.0, 95.0, 100.0])
    ends = [{"time": time, "event": "epoch_finished", "epoch": n, "step": 8 * n, "loss": 1.0} for n, time in times]
    warned = [{"time": 100.1, "event": "warning", "message": text} for text in "ab"]
    lines = shown(*warned, *ends)
    assert [line.split(":")[0] for line in lines[:2]] == ["warning", "warning"]
    assert [int(line.split()[1]) for line in lines[2:]] == [1, 4, 6, 8]


def test_who_watches_a_job_is_not_ended_by_what_stands_in_its_journal():
    wrong = ['"world_formed", "world": 1, "members": 3', '"world_formed"', '"worker_started"', '"worker_slow"']
    screen = Screen((lines := []).append, log_loss_steps=100, outlets=[])
    prints = Prints((0,), screen, PodPrinters(None, "one"))
    late = '{"time": 1, "event": "warning", "message": "late"}'
    for line in ("garbage{", *(f'{{"time": 1, "event": {event}}}' for event in wrong), late):
        show_entry(line, screen, wording.Once(), Seldom(), prints.hear)
    assert lines[-1] == "warning: late"


# ---- how it ended ----


def test_pauses_are_counted_by_change_and_not_by_survivor():
    assert wording.pauses_text(Facts().read(eventful()).conclude()) == "training paused 3 times, 10.00 s at most"


def test_the_summary_and_that_a_job_that_has_diverged_does_not_just_succeed():
    def lines(loss):
        status = status_of(phase="succeeded", epoch=3, step=5000, elapsed=95.0, metrics={"accuracy": 0.9722}, loss=loss)
        return wording.summary_lines(status, found(), "/out", "")

    usual = ["job brave-otter-42 succeeded: 5,000 steps, epoch 4/4, 0:01:35", "  metrics  accuracy 0.9722"]
    usual += ["  training never paused", "  output   /out"]
    assert lines(0.1) == usual
    assert {*lines(math.nan)} - {*usual} == {"  warning  training has diverged: its last loss is nan"}


STOPPED = {"time": 0, "event": "stop_requested", "checkpoint": True}
KEPT = {"time": 1, "event": "checkpoint", "step": 1250, "path": "/home/jobs/brave-otter-42/stopped-0000001250.state"}
UNKEPT = {"time": 1, "event": "checkpoint_failed", "step": 1250, "reason": "pods share no folder"}
IN_S3 = {**KEPT, "path": "s3://a/b", "step": 1000}
NAMED = "the same command, with --job_name brave-otter-42,"


@pytest.mark.parametrize(
    ("journal", "kept"),
    [
        ([STOPPED, KEPT], f"kept in {KEPT['path']}: {NAMED} goes on from there"),
        ([STOPPED, IN_S3], "kept of step 1,000 in s3://a/b: the same command goes on from there"),
        ([STOPPED], "nothing is kept of it"),
        ([STOPPED, UNKEPT], "nothing is kept of it: pods share no folder"),
        ([{**STOPPED, "checkpoint": False}], ""),
    ],
)
def test_of_a_stopped_job_it_is_said_how_it_goes_on(journal, kept):
    status = status_of(phase="stopped", reason="elasticdl stop")
    assert wording.kept_text(status, found(*journal), on_cluster=False) == kept
    assert (wording.summary_lines(status, found(*journal), "", kept)[-1] == f"  {kept}") is bool(kept)
    on_cluster = wording.kept_text(status, found(*journal), on_cluster=True)
    assert ("after `elasticdl delete brave-otter-42` the same command" in on_cluster) is kept.startswith("kept")


def test_what_was_found_is_shown():
    status = status_of(compared_step=1280, compared_workers=3, advice="2 workers do 1.3 times the work of one")
    lines = ["all 3 workers held the same state after step 1,280", "scaling: 2 workers do 1.3 times the work of one"]
    assert sorted(wording.finding_lines(status)) == lines
    assert all(line in drawn(status) for line in lines)
