"""A job on a cluster is followed through a change of its masters: what each tells, and what is kept at its end."""

import json
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from test_cli_kubernetes import RUNNING, OneJob

from elasticdl.cli import follow, job_handle
from elasticdl.cli.cluster_run import MasterWatch
from elasticdl.cli.job_handle import AbsentError, JobHandle
from elasticdl.cli.namespace_job import NamespaceJob, NoMasterError
from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.job.journal import number_of
from elasticdl.kube.client import NotThereError
from elasticdl.master.core.values import Phase
from elasticdl.master.shell.cluster_master import exit_code
from elasticdl.master.shell.journal_file import NUMBERS
from elasticdl.places.judge import Waiting, why_no_master
from elasticdl.proto import elasticdl_pb2 as pb


def watching(job=None):
    return MasterWatch(job or NamespaceJob(OneJob(), "digits"), image_timeout=60.0)


def silent(seen):
    """Of a job that goes on."""
    return follow.Silence(SimpleNamespace(over=lambda: ""), SimpleNamespace(line=seen.append))


def pod(state=None, **status):
    status = {"containerStatuses": [{"name": "elasticdl", "state": state}], **status} if state else status
    return {"metadata": {"name": "m"}, "spec": {} if status.get("conditions") else {"nodeName": "n"}, "status": status}


NO_START, LOG = "its container can't be started on node n: ", "; its log: kubectl logs -n default m"
FAILED = {"phase": "Failed"}
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}


def missing(why, *, lasting=False):
    return Waiting(f"the image can't be pulled: {why}", image=True, lasting=lasting, node="n")


@pytest.mark.parametrize(
    ("seen", "trouble"),
    [
        (None, "its master's pod is not there yet"),
        (pod({"waiting": {"reason": "ErrImagePull", "message": "no\nsuch"}}), missing("no such")),
        (pod({"waiting": {"reason": "InvalidImageName"}}), missing("InvalidImageName", lasting=True)),
        (pod({"waiting": {"reason": "ContainerCreating"}}), "its master is starting"),
        (pod({"waiting": {"reason": "E", "message": "no key"}}), f"its master waits: {NO_START}no key"),
        (pod({"terminated": {"exitCode": 137, "message": "at work"}}, **FAILED), "its master ended: SIGKILL"),
        (
            pod({"terminated": {"exitCode": 2, "message": "a\nb\n"}}, **FAILED),
            f"its master ended: exit code 2: b{LOG}",
        ),
        (pod(conditions=[UNSCHEDULED]), "its master has no place yet: 0/2 nodes"),
        (pod(phase="Failed", reason="Evicted"), "its master ended: Evicted"),
    ],
)
def test_what_is_the_matter_with_a_master(seen, trouble):
    found = why_no_master(seen)
    assert (found.reason if isinstance(trouble, str) else found) == trouble


def test_an_image_is_waited_for_as_long_as_told_and_from_the_beginning_after_it_was_there():
    late, starting = missing("Back-off"), Waiting("its master is starting")
    view, given_up = watching(), []
    for now, why in ((5, late), (64, late), (65, late), (70, starting), (71, late), (130, late), (131, late)):
        try:
            view.look(NoMasterError(why), float(now))
        except JobFailedError:
            given_up.append(now)
    assert given_up == [65, 131]
    with pytest.raises(JobFailedError):
        watching().look(NoMasterError(missing("InvalidImageName", lasting=True)), 0.0)


def test_a_job_without_its_image_stays_and_the_command_says_how_to_remove_it():
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    imageless = {**RUNNING, **pod(waiting), "metadata": {**RUNNING["metadata"], "uid": "u"}}
    with pytest.raises(AbsentError) as absence, NamespaceJob(OneJob(master=imageless), "digits").reach():
        pass
    silent(seen := []).hear(None, absence.value, 5.0)
    assert seen == ["the image can't be pulled: not found"]
    view = watching()
    view.look(absence.value, 5.0)
    line = "job digits: the image can't be pulled: not found; `elasticdl delete digits` removes it"
    with pytest.raises(JobFailedError, match=f"^{line}$"):
        view.look(absence.value, 65.0)


def test_a_job_that_was_deleted_while_it_has_no_master_is_none_of_the_watchs_business():
    class Deleted(OneJob):
        def read(self, kind, name):
            raise NotThereError(404, f'jobs.batch "{name}" not found')

    watching(NamespaceJob(Deleted(), "digits")).look(NoMasterError(Waiting("its master's pod is not there yet")), 0.0)


def test_why_a_master_does_not_run_is_told_once_and_again_when_it_changes():
    """An image is tried for again and again, and two reasons take turns."""
    quota, starting = Waiting("quota"), Waiting("its master is starting")
    view = silent(seen := [])
    for now, why in enumerate((quota, quota, *map(missing, ("not found", "Back-off") * 2), starting)):
        view.hear(None, NoMasterError(why), float(now))
    image = "the image can't be pulled:"
    assert seen == ["quota", f"{image} not found", f"{image} Back-off", "its master is starting"]


def test_a_master_that_runs_and_is_not_reached_is_told_and_that_it_is_reached_again():
    """It is tried again all the time: the first seconds of a master that starts are no news."""
    view, failure = silent(seen := []), UnreachableError("the master did not answer: Socket closed")
    for now in (5.0, 14.9):
        view.hear(None, failure, now)
    assert seen == []
    for now in (16.0, 17.0, 100.0):
        view.hear(None, failure, now)
    line = "its master can't be reached: the master did not answer: Socket closed; it is tried again"
    assert seen == [line]
    for _ in range(2):
        view.hear(pb.JobStatus(), None, 101.0)
    assert seen == [line, "its master is reached again"]
    for now in (106.0, 116.0):
        view.hear(None, failure, now)
    assert seen[2:] == [line]


def test_that_the_cluster_does_not_answer_is_told_and_it_is_not_asked_all_the_time():
    asked, seen = [], []

    def over():
        asked.append(1)
        raise UnreachableError("the cluster does not answer")

    view = follow.Silence(SimpleNamespace(over=over), SimpleNamespace(line=seen.append))
    for now in (5.0, 15.0, 15.05, 15.1):
        view.hear(None, UnreachableError("the cluster does not answer"), now)
    view.hear(pb.JobStatus(), None, 16.0)
    line = "its master can't be reached: the cluster does not answer; it is tried again"
    assert (seen, len(asked)) == ([line, "its master is reached again"], 1)


def test_of_a_job_that_is_over_neither_silence_nor_its_end_is_told():
    asked, seen = [], []
    over = SimpleNamespace(over=lambda: asked.append(1) or "it has ended")
    view = follow.Silence(over, SimpleNamespace(line=seen.append))
    for now in (5.0, 15.0, 15.05, 15.1):
        view.hear(None, UnreachableError("the master does not answer"), now)
    view.hear(pb.JobStatus(), None, 16.0)
    assert (seen, len(asked)) == ([], 1)


@pytest.mark.parametrize(("phase", "code"), [(Phase.SUCCEEDED, 0), (Phase.STOPPED, 0), (Phase.FAILED, 1)])
def test_the_job_of_a_master_that_was_told_to_stop_is_complete(phase, code):
    assert exit_code(phase) == code


def entry(number, **fields):
    return json.dumps({"number": number, "time": 1e9, "event": "warning", **fields})


class Masters(JobHandle):
    """A job with one master after another: each tells how it is and what happened, and leaves it to the next."""

    look_seconds = 0.0

    def __init__(self, monkeypatch, *masters, kept):
        self._masters, self._kept = list(masters), kept
        self._lines = [line for _, lines in masters for line in lines]
        self._journals = iter([lines for _, lines in masters])
        monkeypatch.setattr(job_handle, "AGAIN_SECONDS", 0.0)

    @contextmanager
    def reached(self):
        if not self._masters:
            raise UnreachableError("there is none")
        yield self

    def watch(self):
        if self._masters:
            phases = self._masters.pop(0)[0]
            yield from (pb.JobStatus(phase=phase) for phase in phases)
        raise UnreachableError("it is gone")

    def events(self, after, *, follow):
        return [line for line in next(self._journals, ()) if number_of(line) > after]

    def entries(self, since):
        return [*self._lines, entry(99)]

    def close(self):
        pass

    def over(self):
        return "" if self._masters else "it has ended"

    def kept_status(self):
        return pb.JobStatus(phase=self._kept)


def test_a_job_is_followed_through_a_change_of_masters_and_at_its_end_what_was_kept_is_told(monkeypatch):
    """Neither the last entry nor the last status has come over a stream."""
    told = (["running"], [entry(1), entry(2)]), ([], []), (["waiting"], [entry(1), entry(2), entry(3)])
    with Masters(monkeypatch, *told, kept="succeeded").following(statuses=True) as following:
        heard = [each for each in following if each is not None]
    assert [each.phase for each in heard if not isinstance(each, str)] == ["running", "waiting", "succeeded"]
    assert [each for each in heard if isinstance(each, str)] == [entry(number) for number in (1, 2, 3, 99)]


def test_what_another_master_tells_of_the_journal_is_told_once(monkeypatch):
    """The first has told an entry that it had not saved, and its successor has others in its place."""
    first = [entry(number) for number in (1, 2, 3)]
    second = [*first[:-1], entry(NUMBERS + 1), "damaged", entry(NUMBERS + 2)]
    job = Masters(monkeypatch, (["running"], first), ([], second), ([], second), kept="succeeded")
    job.entries = lambda since: second
    with job.following(statuses=True) as following:
        heard = [each for each in following if isinstance(each, str)]
    assert heard == [*first, second[2], second[4]]


def test_what_is_kept_is_asked_for_until_the_cluster_answers(monkeypatch):
    answers = iter([UnreachableError("it is busy"), UnreachableError("it is busy"), [entry(1)]])

    def kept(since):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    job = Masters(monkeypatch, kept="succeeded")
    job.entries = kept
    with job.following(statuses=False) as following:
        assert [each for each in following if each] == [entry(1)]


def test_whoever_leaves_does_not_wait_for_what_is_kept(monkeypatch):
    asked = threading.Event()

    def busy(since):
        asked.set()
        raise UnreachableError("it is busy")

    job = Masters(monkeypatch, kept="succeeded")
    job.entries = busy
    monkeypatch.setattr(job_handle, "AGAIN_SECONDS", 60.0)
    with job.following(statuses=False) as following:
        while not asked.is_set():
            assert next(iter(following)) is None
        left = time.monotonic()
    assert time.monotonic() - left < job_handle.JOIN_SECONDS / 2


class Forbidden(Masters):
    """Who follows it may not reach its master."""

    @contextmanager
    def reached(self):
        raise UserError("you may not reach the master")
        yield

    def over(self):
        return ""


def test_who_may_not_reach_a_master_waits_for_its_end_only_where_it_is_told_why_nothing_comes(monkeypatch):
    monkeypatch.setattr(job_handle, "REFUSED_SECONDS", 0.05)
    monkeypatch.setattr(job_handle, "FOLLOW_POLL", 0.01)
    job = Forbidden(monkeypatch, kept="running")
    refused = pytest.raises(UserError, match="you may not reach the master")
    with refused, job.following(statuses=False) as following:
        assert not any(each for each in following)
    with job.following(statuses=True) as following:
        beginning = zip(following, range(50), strict=False)
        assert not any(heard for heard, _ in beginning)
        assert isinstance(following.failure, UserError)


def test_while_a_master_hangs_as_its_job_ends_whoever_follows_can_leave():
    hung_up = threading.Event()
    begun = threading.Event()

    class Hanging(Masters):
        def __init__(self):
            pass

        @contextmanager
        def reached(self):
            yield SimpleNamespace(events=self.tell_nothing, watch=self.tell_nothing, close=hung_up.set)

        def tell_nothing(self, *_, **__):
            begun.set()
            hung_up.wait()
            return ()

        def entries(self, since):
            return []

        def over(self):
            begun.wait()
            return "it has ended"

    with Hanging().following(statuses=True) as following:
        assert next(iter(following)) is None
        assert not hung_up.is_set(), "its end was waited for"
    assert hung_up.is_set()
