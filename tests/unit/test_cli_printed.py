"""What workers print, as those see it who follow their job; and where it stands among the lines of `elasticdl logs`."""

from __future__ import annotations

import errno
import io
import json
import random
import re
import sys

import pytest
import urllib3
from kubernetes_kit import pod, terminated
from refusal_kit import refused

from elasticdl.cli import pod_logs
from elasticdl.cli.folder_job import LocalLogs
from elasticdl.cli.follow import FilePrinters, PrintedLines, Prints, apart, local_prints
from elasticdl.cli.namespace_job import NamespaceJob
from elasticdl.cli.pod_logs import PodPrinters
from elasticdl.cli.screens import Outlet, Stream, moment, open_screen
from elasticdl.job.jobdir import create_job_dir
from elasticdl.job.journal import WorldMark, dump_entry, split_at_mark, without_marks
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import NoAnswerError, NotDoneError
from elasticdl.master.shell.state_config_map import JOURNAL, pack
from elasticdl.proto import elasticdl_pb2 as pb

OUT, ERR = Stream.OUT, Stream.ERR


class PrintedScreen:
    """A screen that keeps what is printed, and what is said."""

    def __init__(self, *, is_terminal=False):
        self.texts = {OUT: "", ERR: ""}
        self.begun = ""
        self.said = []
        self.is_terminal = is_terminal

    def draws(self, stream):
        return self.is_terminal

    def printed(self, lines, stream):
        self.texts[stream] += lines.decode()

    def unfinished(self, line, stream, prefix):
        self.begun = line.decode()

    def line(self, text):
        self.said.append(text)


class PrintingJob:
    """A job's folder in which the test plays the workers that print, and the master whose journal is followed."""

    def __init__(self, ranks="0"):
        self.dir = create_job_dir("job")
        self.now, self.version = 1000.0, 0
        self.unheard = None  # entries that are heard later, if any are
        self.shown = PrintedScreen()
        printers = FilePrinters(self.dir, {OUT: self.dir.worker_log})
        self.prints = Prints(JobSpec(log_ranks=ranks).shown_ranks(), self.shown, printers)

    def launched(self, *workers):
        for worker in workers:
            self.dir.worker_log(worker).touch()
            self.record("worker_launched", worker=worker)

    def record(self, event, **fields):
        self.now += 1.0
        hear = self.prints.hear if self.unheard is None else self.unheard.append
        hear({"time": self.now, "event": event, **fields})

    def hear(self):
        while self.unheard:
            self.prints.hear(self.unheard.pop(0))

    def world(self, *members):
        self.version += 1
        self.record("world_formed", world=self.version, members=list(members))
        for rank, worker in enumerate(members):
            self.print(worker, WorldMark(moment(self.now + 0.1), worker, rank, self.version).to_line().decode())

    def print(self, worker, text, *, to=None):
        with (to or self.dir.worker_log)(worker).open("a") as log:
            log.write(text)

    def look(self):
        self.prints.look()
        return self.shown.texts[OUT]


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path / "home"))


# ---- which workers ----


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_what_was_printed_by_whoever_had_rank_0_is_shown_once_however_worlds_and_looks_come(seed, is_late):
    """Also if the journal is heard later than what the workers print."""
    draw, job, ids = random.Random(seed), PrintingJob(), 0
    printed = []  # what is to be shown, each line with its worker and whether it has rank 0
    members, leaving = [], []
    job.unheard = [] if is_late else None

    def prints(worker, text):
        job.print(worker, f"{worker}: {text}\n")
        if worker == members[0] or worker in leaving:
            printed.append((f"{worker}: {text}", worker, worker == members[0]))

    for number in range(60):
        match draw.choice(("print", "print", "print", "look", "hear", "world", "left")):
            case "print" if members:
                prints(draw.choice([*members, *leaving]), f"line {number}")
            case "look":
                job.look()
            case "hear":
                job.hear()
            case "left" if leaving:
                job.record("worker_left", worker=leaving.pop(), code=0)
            case "world" if not leaving:
                newcomers = list(range(ids, ids := ids + 2))
                job.launched(*newcomers)
                before = members[:1]
                members = draw.sample([*members, *newcomers], draw.randint(1, len(members) + 1) if members else 2)
                members = members if before else newcomers
                job.world(*members)
                if not before:
                    prints(members[0], "begins")
                # Only of rank 0 it is of interest what it prints while it leaves.
                leaving = [each for each in before if each not in members]
    job.hear()
    shown = job.look().splitlines()
    assert sorted(shown) == sorted(line for line, _, _ in printed)
    firsts = [line for line, _, is_first in printed if is_first]
    assert [line for line in shown if line in firsts] == firsts
    for worker in range(ids):
        own = [line for line, writer, _ in printed if writer == worker]
        assert [line for line in shown if line.startswith(f"{worker}:")] == own


def test_a_line_that_a_worker_has_not_ended_is_ended_where_another_has_rank_0():
    job = PrintingJob()
    job.launched(0, 1)
    job.world(0, 1)
    job.print(0, "1 of 2")
    job.world(1, 0)
    job.print(1, "2 of 2\n")
    assert job.look() == "1 of 2\n2 of 2\n"


def test_all_workers_have_their_names_before_each_line():
    job = PrintingJob("all")
    job.launched(0, 1)
    job.print(0, "a\nb\n\r 3%|\r 50%|\r100%|\n")
    job.print(1, "c\nun")
    job.look()
    job.print(1, "finished\n")
    assert job.look() == "[worker 0] a\n[worker 0] b\n[worker 0] 100%|\n[worker 1] c\n[worker 1] unfinished\n"


# ---- marks ----

MARK = WorldMark("2026-01-31 23:59:59.123", 3, 0, 5)


def test_a_mark_is_found_in_the_midst_of_a_line_and_however_it_is_read():
    line = MARK.to_line()
    assert split_at_mark(b"1 of 3 [" + line + b"2 of 3") == (b"1 of 3 [", MARK, b"2 of 3")
    for size in range(1, len(line)):
        assert split_at_mark(b"a\n1 of 3 [" + line[:size]) == (b"a\n1 of 3 [", None, line[:size])
    for other in (b"", b"50%|## [00:01", b"[elasticdl]\n", b"[elasticdl " + b"x" * 200):
        assert split_at_mark(other) == (other, None, b"")
    assert without_marks(f"a{line.decode()}b\n{line.decode()}") == "ab\n"


# ---- where it goes ----


def test_one_file_for_both_streams_where_both_lead_to_one_place(tmp_path):
    with (tmp_path / "a").open("w") as one, (tmp_path / "a").open("w") as same, (tmp_path / "b").open("w") as other:
        out, err, elsewhere = Outlet(one.fileno(), OUT), Outlet(same.fileno(), ERR), Outlet(other.fileno(), ERR)
        script, module = JobSpec(command=("python", "x.py")), JobSpec(model_def="m")
        assert [apart(script, out, err), apart(script, out, elsewhere), apart(module, out, err)] == [False, True, True]
        job = PrintingJob()
        job.launched(0)
        job.print(0, "the worker's own\n")
        job.print(0, "the module's\n", to=job.dir.worker_out)
        prints = local_prints(job.dir, module, job.shown, out, err)
        prints.look()
        assert job.shown.texts == {OUT: "the module's\n", ERR: ""}


@pytest.mark.parametrize(
    ("printed", "whole", "rest"),
    [
        ("a\nb", "a\n", "b"),
        ("\r 3%|\r 50%|", "", " 50%|"),
        ("\r 3%|\r     \rdone\n", "done\n", ""),  # a bar that does not stay
        ("windows\r\nends\r\n", "windows\nends\n", ""),
        ("\r 3%|\r\x1b[K 4%|", "", " 4%|"),
        ("outer 0\n\rinner 9\x1b[A\rinner done\n\router 1", "inner done\n", "outer 1"),
        ("a 0\n\rb 0\x1b[A\n\n\rc 0\x1b[A\x1b[A\n\rb 1\x1b[A", "", "a 0\nb 1\nc 0"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_on_a_terminal_a_line_that_is_written_over_stands_once(printed, whole, rest, at_once):
    shown = PrintedScreen(is_terminal=True)
    lines = PrintedLines(shown, OUT)
    for part in [printed] if at_once else re.split(r"(?<=[|\d])(?=\r)|(?<=\[A)(?!\x1b)", printed):
        lines.feed(part.encode())
    assert (shown.texts[OUT], shown.begun) == (whole, rest)
    lines.end()
    assert shown.texts[OUT] == whole + rest + "\n" * bool(rest)


class LostTerminal(io.StringIO):
    gone = False

    def isatty(self):
        return True

    def write(self, text):
        if self.gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


def test_a_traceback_has_been_shown_though_its_framework_puts_the_rank_before_its_lines():
    lines = PrintedLines(PrintedScreen(), OUT)
    lines.feed(b"step 3\n[rank1]: Traceback:\n[rank1]:   f()\n[rank1]: ValueError: no\n")
    assert lines.has_shown("Traceback:\n  f()\nValueError: no")
    assert not lines.has_shown("ValueError: never")


def test_above_the_panel_lines_are_as_they_were_printed_and_the_job_goes_on_without_the_terminal(monkeypatch):
    """The unfinished line stands in the panel."""
    monkeypatch.setattr(Outlet, "is_terminal", True)
    monkeypatch.setattr(sys, "stderr", terminal := LostTerminal())
    for name, value in {"COLUMNS": "40", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    long = "\x1b[32mgreen\x1b[0m [b] " + "long " * 30
    with open_screen(100, [Outlet(-1, OUT)]) as screen:
        screen.unfinished(b"outer 3%|\ninner 50%|", OUT, "")
        screen.printed(f"{long}\n".encode(), OUT)
        screen.line("before")
        terminal.gone = True
        screen.show(pb.JobStatus(phase="running"))
        screen.line("after")
    _, panel = terminal.getvalue().split(f"{long}\n")
    assert re.search(r"outer 3%\|\s*\ninner 50%\|\s*\n.*pending", panel)
    assert ("before" in panel, "after" in panel) == (True, False)


def test_lines_without_a_time_stand_where_their_worker_was_started_or_entered_a_world():
    folder, now = create_job_dir("job"), 1000.0

    def master(event, **fields):
        nonlocal now
        now += 1.0
        with folder.journal.open("a") as journal, folder.master_log.open("a") as log:
            journal.write(json.dumps({"time": now, "event": event, **fields}) + "\n")
            log.write(f"{moment(now).replace('.', ',')} {event}\n")

    def worker(text, path_of=folder.worker_log):
        with path_of(0).open("a") as file:
            file.write(text)

    master("job_started")
    master("worker_started", worker=0)
    worker("loads\n")
    master("world_formed", world=1, members=[0])
    worker("a bar: 50%|")
    mark = WorldMark(moment(now + 0.1), 0, 0, 1).to_line().decode()
    worker(mark)
    worker(mark, folder.worker_out)
    worker("1961-01-01 00:00:00 is a date in the data\n")
    worker("step 1\n", folder.worker_out)
    master("epoch_finished")
    lines = [re.sub(r"\| \d{4}.*? (?=[a-z]+_)", "| ", line) for line in LocalLogs(folder, None).look()]
    assert lines == [
        "master    | job_started",
        "master    | worker_started",
        "worker-0  | loads",
        "worker-0  | a bar: 50%|",
        "master    | world_formed",
        "worker-0  | step 1",
        "worker-0  | 1961-01-01 00:00:00 is a date in the data",
        "master    | epoch_finished",
    ]


# ---- whose lines they are in the log of a pod in which several workers ran, and which pod is read for a worker ----

LOST = NoAnswerError(500, "the cluster at c failed: Get https://10.0.0.3:10250/containerLogs: connection refused")
FORBIDDEN = NotDoneError(403, 'you may not read the log of w-1: User "u" cannot get resource "pods/log"')


class Log(io.BytesIO):
    """It breaks off at a null byte, as when the API server is gone."""

    def __init__(self, text):
        super().__init__(text.removesuffix("\0").encode())
        self.data, self._breaks = self.getvalue(), text.endswith("\0")

    def __next__(self):
        if self._breaks and self.tell() == len(self.data):
            raise urllib3.exceptions.ProtocolError("broken")
        return super().__next__()

    def shutdown(self): ...


def name(number):
    return f"digits-worker-{number}"


class LogsOfPods:
    """The logs of some workers' pods, which have ended: of each text, or what it is at each reading. ``unread``: those whose logs can't be
    read, with the error; ``entry``: more about where worker 5 was started, by the journal that is kept."""

    def __init__(self, *logs, unread=None, entry=None):
        self._logs = {name(number): [log] if isinstance(log, str) else list(log) for number, log in enumerate(logs)}
        self._unread, self.read = unread or {}, set()
        self._journal = dump_entry({"time": 1.0, "event": "worker_started", "worker": 5, **(entry or {})})

    def list(self, kind, *, label_selector="", field_selector=""):
        return [pod(number, "Succeeded", terminated(0)) for number in range(len(self._logs)) if kind == "Pod"]

    def find(self, kind, name):
        if name.endswith("-state"):
            return {"binaryData": {JOURNAL: pack(self._journal.encode())}}
        return {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}

    def log(self, pod, follow=False):
        if pod in self._unread:
            raise self._unread[pod]
        self.read.add(pod)
        readings = self._logs[pod]
        return Log(readings.pop(0) if readings[1:] else readings[0])

    def is_read_to_its_end(self):
        return not any(readings[1:] for readings in self._logs.values())


def read(pods, worker=None):
    return list(pod_logs.read_logs(pods, "job", worker))


def followed(pods, worker=None, over=lambda: True):
    return list(pod_logs.follow_logs(pods, "job", worker, over))


def shown_of(pods, ranks, *worlds):
    """On a screen, of a job that was in these worlds."""
    shown = PrintedScreen()
    prints = Prints(JobSpec(log_ranks=ranks).shown_ranks(), shown, PodPrinters(pods, "job"))
    for number, members in enumerate(worlds, 1):
        prints.hear({"event": "world_formed", "time": float(number), "world": number, "members": members})
    with prints.shown(wait=lambda: True):
        pass
    return shown


def in_pod(*lines):
    """Each with the time by the clock of its node, which is of no use."""
    return "".join(f"2001-01-01T00:00:00.{number}Z {line}\n" for number, line in enumerate(lines))


def entered(worker, rank, world):
    return WorldMark("2026-01-31 23:59:59.123", worker, rank, world).to_line().decode().removesuffix("\n")


def said(second, text):
    return f"1970-01-01T00:00:{second:02}Z 1970-01-01 00:00:{second:02},000 w-0 INFO elasticdl.places.agent: {text}\n"


# One pod, in which worker 2 has followed worker 0, which was cut short in the middle of a line.
SHARED = (
    said(1, "starting worker 0")
    + f"1970-01-01T00:00:02Z {entered(0, 0, 1)}\n1970-01-01T00:00:03Z a\n"
    + f"1970-01-01T00:00:04Z half{said(4, 'worker 0 has ended')[21:]}"
)
SHARED += f"{said(5, 'starting worker 2')}1970-01-01T00:00:06Z {entered(2, 0, 2)}\n1970-01-01T00:00:07Z b\n"
FIFTH = (SHARED, f"{said(1, 'starting worker 5')}1970-01-01T00:00:02Z {entered(5, 0, 1)}\n1970-01-01T00:00:03Z c\n")


def test_workers_that_ran_in_one_pod_one_after_another_are_told_apart():
    assert (read(LogsOfPods(SHARED), 0), read(LogsOfPods(SHARED), 2)) == (["a"], ["b"])
    writers = [line.partition(" ")[0] for line in read(LogsOfPods(SHARED))]
    assert writers == ["place-0", "worker-0", "place-0", "place-0", "worker-2"]
    told = "job job has no logs of worker 7; it has logs of place-0, worker-0, worker-2"
    refused(told, lambda: read(LogsOfPods(SHARED), 7))
    assert shown_of(LogsOfPods(SHARED), "0", [0], [2]).texts[OUT] == "a\nb\n"


@pytest.mark.parametrize("look", [read, followed])
def test_of_a_pod_on_a_lost_node_it_is_told_that_it_can_not_be_read_and_the_others_are_shown(capsys, look):
    lines = look(LogsOfPods(SHARED, SHARED, unread={name(1): LOST}))
    assert {line[-1] for line in lines if line.startswith("worker")} == {"a", "b"}
    assert capsys.readouterr().err == f"the log of {name(1)} can't be read now: {LOST}\n"


def test_a_log_that_breaks_off_is_followed_on_from_there(monkeypatch):
    monkeypatch.setattr(pod_logs, "LOOK_SECONDS", 0.0)
    pods = LogsOfPods(["one\ntwo\n\0", "one\n\0", "one\ntwo\nthree\n\0", "one\ntwo\nthree\nfour\n"])
    assert followed(pods, 0, pods.is_read_to_its_end) == ["one", "two", "three", "four"]


def test_who_follows_logs_and_may_not_read_them_is_told_so():
    refused("you may not read the log", lambda: followed(LogsOfPods(SHARED, SHARED, unread={name(1): FORBIDDEN})))


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(("entry", "read"), [({"place": name(1)}, {1}), ({}, {0, 1}), ({"place": "removed"}, {0, 1})])
def test_of_a_worker_only_its_pod_is_read_if_it_is_known_which_that_is(follow, entry, read):
    pods = LogsOfPods(*FIFTH, entry=entry)
    assert [line[-1] for line in NamespaceJob(pods, "job").logs(5, follow=follow)] == ["c"]
    assert pods.read == set(map(name, read))


# ---- what is shown of it ----


def test_another_rank_0_goes_on_where_the_last_one_ended():
    first = in_pod("loads", entered(0, 0, 1), "step 1", "late")
    second = in_pod("loads", entered(1, 1, 1), "step 1", entered(1, 0, 2), "step 2")
    stays = in_pod("loads", entered(0, 0, 1), "step 1", entered(0, 1, 2), "step 2")
    leaves = [0, 1], [1]
    assert shown_of(LogsOfPods("", second), "0", *leaves).texts[OUT] == "step 2\n"
    assert shown_of(LogsOfPods(first, second), "0", *leaves).texts[OUT] == "loads\nstep 1\nlate\nstep 2\n"
    assert shown_of(LogsOfPods(stays, second), "0", [0, 1], [1, 0]).texts[OUT] == "loads\nstep 1\nstep 2\n"
    every = shown_of(LogsOfPods(first, second), "all", *leaves).texts[OUT].splitlines()
    own = {0: ["loads", "step 1", "late"], 1: ["loads", "step 1", "step 2"]}
    assert sorted(every) == sorted(f"[worker {worker}] {text}" for worker, texts in own.items() for text in texts)
