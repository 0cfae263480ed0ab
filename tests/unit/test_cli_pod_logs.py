"""Whose lines they are in the log of a pod in which several workers ran, which pod is read for a worker, and what is shown of it."""

import io

import pytest
import urllib3
from kubernetes_kit import pod, terminated
from refusal_kit import refused
from test_cli_printed import OUT, PrintedScreen

from elasticdl.cli import pod_logs
from elasticdl.cli.follow import Prints
from elasticdl.cli.namespace_job import NamespaceJob
from elasticdl.cli.pod_logs import PodPrinters
from elasticdl.job.journal import WorldMark, dump_entry
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import NoAnswerError, NotDoneError
from elasticdl.master.shell.state_config_map import JOURNAL, pack

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
