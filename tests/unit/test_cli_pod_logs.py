"""Whose lines they are in the log of a pod in which several workers ran, and which pod is read for a worker."""

import time

import pytest
import urllib3
from test_cli_printed import OUT, Log, Pods, Shown, entered, shown_of

from elasticdl.cli import pod_logs
from elasticdl.cli.follow import Prints
from elasticdl.cli.namespace_job import NamespaceJob
from elasticdl.cli.pod_logs import PodPrinters
from elasticdl.common.errors import ElasticDLError, UnreachableError, UserError
from elasticdl.job.journal import dump_entry
from elasticdl.kube.client import NoAnswerError, NotDoneError
from elasticdl.master.shell.state_config_map import JOURNAL, pack


def said(second, text):
    return f"1970-01-01T00:00:{second:02}Z 1970-01-01 00:00:{second:02},000 w-0 INFO elasticdl.places.agent: {text}\n"


# One pod, in which worker 2 has followed worker 0, which was cut short in the middle of a line.
SHARED = (
    said(1, "starting worker 0")
    + f"1970-01-01T00:00:02Z {entered(0, 0, 1)}\n1970-01-01T00:00:03Z a\n"
    + f"1970-01-01T00:00:04Z half{said(4, 'worker 0 has ended')[21:]}"
)
SHARED += f"{said(5, 'starting worker 2')}1970-01-01T00:00:06Z {entered(2, 0, 2)}\n1970-01-01T00:00:07Z b\n"


def test_workers_that_ran_in_one_pod_one_after_another_are_told_apart():
    assert list(pod_logs.read_logs(Pods(SHARED), "job", 0)) == ["a"]
    assert list(pod_logs.read_logs(Pods(SHARED), "job", 2)) == ["b"]
    every = list(pod_logs.read_logs(Pods(SHARED), "job", None))
    assert [line.partition(" ")[0] for line in every] == ["place-0", "worker-0", "place-0", "place-0", "worker-2"]
    with pytest.raises(UserError, match="job job has no logs of worker 7; it has logs of place-0, worker-0, worker-2"):
        list(pod_logs.read_logs(Pods(SHARED), "job", 7))
    shown = shown_of(Pods(SHARED), "0", [0], [2])
    assert shown.texts[OUT] == "a\nb\n"


LOST = "the cluster at c failed: Get https://10.0.0.3:10250/containerLogs: connect: connection refused"


class LostNode(Pods):
    """Of these pods the logs can't be read."""

    def __init__(self, *logs, lost=("w-1",), error=None):
        super().__init__(*logs)
        self._lost, self._error = lost, error or NoAnswerError(500, LOST)

    def log(self, pod, follow=False):
        if pod in self._lost:
            raise self._error
        return super().log(pod, follow)


@pytest.mark.parametrize("follow", [False, True])
def test_of_a_pod_on_a_lost_node_it_is_told_that_it_can_not_be_read_and_the_others_are_shown(capsys, follow):
    pods = LostNode(SHARED, SHARED)
    if follow:
        lines = list(pod_logs.follow_logs(pods, "job", None, lambda: True))
    else:
        lines = list(pod_logs.read_logs(pods, "job", None))
    assert {line[-1] for line in lines if line.startswith("worker")} == {"a", "b"}
    assert capsys.readouterr().err == f"the log of w-1 can't be read now: {LOST}\n"


def test_who_asks_for_what_is_on_a_lost_node_is_told_that_and_not_that_it_never_was():
    with pytest.raises(UnreachableError, match="the log of w-1 can't be read now: the cluster at c failed"):
        list(pod_logs.read_logs(LostNode(SHARED, SHARED), "job", 7))
    with pytest.raises(UnreachableError, match=r"the log of w-0 .*; the log of w-1 "):
        list(pod_logs.read_logs(LostNode(SHARED, SHARED, lost=("w-0", "w-1")), "job", None))
    assert list(pod_logs.read_logs(LostNode(SHARED, SHARED), "job", 2)) == ["b"]


class BreaksOff(Pods):
    """Each reading of the log sees a little more of it; it breaks off at a null byte, as when the API server is gone."""

    def __init__(self, *readings):
        super().__init__(readings[-1])
        self.readings = list(readings)

    def log(self, pod, follow=False):
        reading = self.readings.pop(0) if self.readings[1:] else self.readings[0]

        class Broken(Log):
            def __next__(self):
                if self.tell() == len(self.getvalue()) and reading.endswith("\0"):
                    raise urllib3.exceptions.ProtocolError("broken")
                return super().__next__()

        return Broken(reading.removesuffix("\0").encode())


def test_a_log_that_breaks_off_is_followed_on_from_there(monkeypatch):
    monkeypatch.setattr(pod_logs, "LOOK_SECONDS", 0.0)
    pods = BreaksOff("one\ntwo\n\0", "one\n\0", "one\ntwo\nthree\n\0", "one\ntwo\nthree\nfour\n")
    lines = list(pod_logs.follow_logs(pods, "job", 0, lambda: not pods.readings[1:]))
    assert lines == ["one", "two", "three", "four"]


def test_who_follows_logs_and_may_not_read_them_is_told_so():
    refused = NotDoneError(403, 'you may not read the log of w-1: User "u" cannot get resource "pods/log"')
    with pytest.raises(UserError, match="you may not read the log"):
        list(pod_logs.follow_logs(LostNode(SHARED, SHARED, error=refused), "job", None, lambda: True))


class JobPods(Pods):
    """Worker 5 runs in the second pod, by the journal that is kept; which logs were read is noted."""

    def __init__(self, *logs, entry):
        super().__init__(*logs)
        self.read, self._journal = [], dump_entry({"time": 1.0, "event": "worker_started", "worker": 5, **entry})

    def find(self, kind, name):
        if name.endswith("-state"):
            return {"binaryData": {JOURNAL: pack(self._journal.encode())}}
        return {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}

    def log(self, pod, follow=False):
        self.read.append(pod)
        return super().log(pod, follow)


FIFTH = (SHARED, f"{said(1, 'starting worker 5')}1970-01-01T00:00:02Z {entered(5, 0, 1)}\n1970-01-01T00:00:03Z c\n")


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize(
    ("entry", "read"), [({"place": "w-1"}, ["w-1"]), ({}, ["w-0", "w-1"]), ({"place": "removed"}, ["w-0", "w-1"])]
)
def test_of_a_worker_only_its_pod_is_read_if_it_is_known_which_that_is(follow, entry, read):
    pods = JobPods(*FIFTH, entry=entry)
    lines = list(NamespaceJob(pods, "job").logs(5, follow=follow))
    assert [line[-1] for line in lines] == ["c"]
    assert sorted(set(pods.read)) == read


def test_who_follows_the_logs_of_a_job_whose_status_is_damaged_is_told_so(monkeypatch):
    monkeypatch.setattr(pod_logs, "LOOK_SECONDS", 0.0)
    answers = iter([UnreachableError("the cluster is busy"), ElasticDLError("the last status of job job is damaged")])

    def over():
        raise next(answers)

    with pytest.raises(ElasticDLError, match="is damaged"):
        list(pod_logs.follow_logs(JobPods(*FIFTH, entry={}), "job", 5, over))


class OfMasters(Pods):
    def list(self, kind, **selection):
        found = super().list(kind, **selection)
        for pod in found:
            pod["metadata"]["labels"] = {"elasticdl.org/role": "master"}
        return found


def test_the_lines_of_two_masters_stand_where_they_were_written():
    """By its clock the second has begun before the first had ended."""
    first, second = (
        "".join(f"1970-01-01T00:00:0{second}Z {text}\n" for second, text in lines)
        for lines in ([(1, "a"), (4, "d")], [(2, "b"), (3, "c")])
    )
    for logs in ((first, second), (second, first)):
        assert [line[-1] for line in pod_logs.read_logs(OfMasters(*logs), "job", None)] == ["a", "b", "c", "d"]


def test_of_many_pods_some_are_read_at_a_time(monkeypatch):
    monkeypatch.setattr(pod_logs, "AT_ONCE", 2)
    reading, most = set(), []

    class Counted(Pods):
        def log(self, pod, follow=False):
            class Read(Log):
                def close(self):
                    reading.discard(pod)
                    super().close()

            reading.add(pod)
            most.append(len(reading))
            time.sleep(0.01)
            return Read(self._logs[pod].encode())

    lines = list(pod_logs.read_logs(Counted(*[SHARED] * 9), "job", 0))
    assert (len(lines), max(most)) == (9, 2)


def test_a_worker_that_is_in_a_pod_and_has_printed_nothing_yet_has_an_empty_log():
    pods = JobPods(SHARED, said(1, "starting worker 5"), entry={"place": "w-1"})
    assert list(NamespaceJob(pods, "job").logs(5, follow=False)) == []


def test_of_the_prints_of_rank_0_only_its_pod_is_read():
    pods = JobPods(*FIFTH, entry={})
    shown = Shown()
    prints = Prints((0,), shown, PodPrinters(pods, "job"))
    prints.hear({"event": "worker_started", "worker": 5, "host": "n", "pid": 1, "place": "w-1"})
    prints.hear({"event": "world_formed", "time": 2.0, "world": 1, "members": [5]})
    with prints.shown(wait=lambda: True):
        pass
    assert (shown.texts[OUT], set(pods.read)) == ("c\n", {"w-1"})
