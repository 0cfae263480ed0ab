"""A job on a cluster is followed through a change of its masters: what each tells, what is the matter with one, and what is kept."""

import json
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from kubernetes_kit import condition, pod, terminated, waiting
from refusal_kit import refused

from elasticdl.cli import follow, job_handle
from elasticdl.cli.cluster_run import MasterWatch
from elasticdl.cli.job_handle import AbsentError, JobHandle
from elasticdl.cli.namespace_job import NamespaceJob, NoMasterError
from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.job.journal import number_of
from elasticdl.master.core.values import Phase
from elasticdl.master.shell.cluster_master import exit_code
from elasticdl.master.shell.journal_file import NUMBERS
from elasticdl.master.shell.state_config_map import STATUS, pack
from elasticdl.places.judge import Waiting, why_no_master
from elasticdl.proto import elasticdl_pb2 as pb


class OneJob:
    """A cluster as a job's commands see it: its Job is there, and what is given."""

    namespace, server = "lab", "https://cluster"

    def __init__(self, status="", master=None, rights=(), events=()):
        state = {"binaryData": {STATUS: pack(status.encode())}} if status else {}
        self._objects = {"Job": {"metadata": {}}, "ConfigMap": {"metadata": {}, **state}}
        self._listed = {"Pod": [master] if master else [], "Event": events}
        self.may = lambda *asked: asked in rights

    def find(self, kind, name):
        return self._objects[kind]

    read = find

    def list(self, kind, **selection):
        return list(self._listed[kind])


def one_job(**about):
    return NamespaceJob(OneJob(**about), "digits")


@pytest.fixture
def deaf(monkeypatch):
    """Its master does not answer."""
    monkeypatch.setattr(NamespaceJob, "_endpoint", lambda *_: refused_at_once(UnreachableError("it did not answer")))


@contextmanager
def refused_at_once(error):
    raise error
    yield


# ---- what is the matter with a master ----


def event(when, reason, message="", kind="Warning"):
    return {"lastTimestamp": f"2026-01-01T00:00:{when:02}Z", "type": kind, "reason": reason, "message": message}


MADE = event(1, "SuccessfulCreate", kind="Normal")
REFUSED = event(2, "FailedCreate", 'Error creating: pods "m-x" is forbidden: exceeded quota: q')
UNMOUNTED = event(3, "FailedMount", "the server is not there")
STARTING, EVICTED = pod(state=waiting("ContainerCreating")), pod(phase="Failed", reason="Evicted")
UNSCHEDULED = pod(node="", conditions=[condition("PodScheduled", "False", message="0/2 nodes")])
FAILED, RUNS = pod(phase="Failed", state=terminated(2, message="a\nb\n")), pod(phase="Running")
NOT_YET, ANSWERS_NOT = "its master's pod is not there yet", "its master does not answer at the moment"
QUOTA = "the cluster does not take its master's pod: exceeded quota: q"
NO_START, IMAGE = "its container can't be started on node n0: ", "the image can't be pulled: "
ENDED = "its master ended: exit code 2: b; its log: kubectl logs -n lab digits-worker-0"


@pytest.mark.parametrize(
    ("master", "events", "reason"),
    [
        (FAILED, [], ENDED),
        (UNSCHEDULED, [], "its master has no place yet: 0/2 nodes"),
        # Where only an event says it.
        (None, [MADE, REFUSED], QUOTA),
        (None, [REFUSED, {**MADE, "lastTimestamp": "2026-01-01T00:00:09Z"}], NOT_YET),
        (EVICTED, [MADE, REFUSED], QUOTA),
        (STARTING, [UNMOUNTED], "its master waits: it can't be started on node n0: the server is not there"),
        (STARTING, [UNMOUNTED, event(4, "Pulling", "Pulling image", "Normal")], "its master is starting"),
    ],
)
def test_why_there_is_no_master_is_told(master, events, reason):
    assert one_job(master=master, events=events).status().reason == reason


@pytest.mark.parametrize(
    ("kept", "master", "phase", "reason"),
    [
        ("", RUNS, "starting", ANSWERS_NOT),
        ("running", None, "running", f"there is no master at the moment: {NOT_YET}; showing"),
        ("running", RUNS, "running", f"{ANSWERS_NOT}; showing the last saved status"),
        ("stopped", RUNS, "stopped", ""),
    ],
)
def test_a_job_without_a_master_is_shown_as_it_was_last(deaf, kept, master, phase, reason):
    status = json.dumps({"phase": kept, "step": "7"}) if kept else ""
    seen = one_job(status=status, master=master, rights=[("get", "pods/portforward")]).status()
    assert (seen.phase, seen.step, seen.reason.startswith(reason)) == (phase, 7 if kept else 0, True), seen.reason


def test_who_may_not_reach_a_master_and_who_has_none_is_told_what_helps(deaf):
    line = "you may not reach the master: it takes the right to get pods/portforward in namespace lab"
    refused(line, one_job(master=RUNS).status)
    line = f"job digits has no master at the moment: {NOT_YET}; `elasticdl status digits` tells when it has; "
    refused(f"{line}`elasticdl delete digits` ends it without one", one_job().master().__enter__)


@pytest.mark.parametrize(("phase", "code"), [(Phase.SUCCEEDED, 0), (Phase.STOPPED, 0), (Phase.FAILED, 1)])
def test_the_job_of_a_master_that_was_told_to_stop_is_complete(phase, code):
    assert exit_code(phase) == code


# ---- who follows ----


def missing(why, message=""):
    return why_no_master(pod(state=waiting(why, message)))


def test_an_image_is_waited_for_as_long_as_told_and_from_the_beginning_after_it_was_there():
    late, starting = missing("ErrImagePull", "Back-off"), why_no_master(STARTING)
    view, given_up = MasterWatch(one_job(), image_timeout=60.0), []
    for now, why in ((5, late), (64, late), (65, late), (70, starting), (71, late), (130, late), (131, late)):
        try:
            view.look(NoMasterError(why), float(now))
        except JobFailedError:
            given_up.append(now)
    assert given_up == [65, 131]
    lasting = NoMasterError(missing("InvalidImageName"))
    told = "^job digits: the image can't be pulled: InvalidImageName; `elasticdl delete digits` removes it$"
    refused(told, lambda: MasterWatch(one_job(), image_timeout=60.0).look(lasting, 0.0), JobFailedError)


BUSY = "the cluster is busy"
AGAIN = f"its master can't be reached: {BUSY}; it is tried again"
UNHEARD = UnreachableError(BUSY)
TAKE_TURNS = enumerate(map(NoMasterError, [Waiting("quota"), *[missing("E", "x"), missing("ErrImagePull", "y")] * 2]))
FOR_LONG = [*((now, UNHEARD) for now in (5.0, 15.0, 17.0, 100.0)), (101.0, None), (102.0, None), (106.0, UNHEARD)]


@pytest.mark.parametrize(
    ("hears", "over", "told"),
    [
        # An image is tried for again and again, and two reasons take turns.
        (TAKE_TURNS, "", ["quota", f"its master waits: {NO_START}x", f"{IMAGE}y"]),
        # One that runs and is not reached is tried again all the time: its first seconds are no news.
        ([(5.0, UNHEARD), (14.9, UNHEARD)], "", []),
        ([(5.0, UNHEARD), (15.0, UNHEARD), (16.0, None)], "it has ended", []),
        (FOR_LONG, "", [AGAIN, "its master is reached again"]),
    ],
)
def test_why_a_master_is_not_heard_is_told_once_and_again_when_it_changes(hears, over, told):
    view = follow.Silence(SimpleNamespace(over=lambda: over), SimpleNamespace(line=(seen := []).append))
    for now, error in hears:
        view.hear(None if error else pb.JobStatus(), error, float(now))
    assert seen == told


def entry(number, **fields):
    return json.dumps({"number": number, "time": 1e9, "event": "warning", **fields})


class Masters(JobHandle):
    """A job with one master after another: each tells how it is and what happened, and leaves it to the next. ``kept``: what
    its journal has at its end, or an error that asking for it raises."""

    look_seconds = 0.0

    def __init__(self, monkeypatch, *masters, kept=((),)):
        self._masters, self._kept = list(masters), iter(kept)
        self._journals = iter([lines for _, lines in masters])
        monkeypatch.setattr(job_handle, "AGAIN_SECONDS", 0.0)

    @contextmanager
    def reached(self):
        if not self._masters:
            raise UnreachableError("there is none")
        yield self

    def watch(self):
        if self._masters:
            yield from (pb.JobStatus(phase=phase) for phase in self._masters.pop(0)[0])
        raise UnreachableError("it is gone")

    def events(self, after, *, follow):
        return [line for line in next(self._journals, ()) if number_of(line) > after]

    def entries(self, since):
        if isinstance(found := next(self._kept), Exception):
            raise found
        return found

    def close(self): ...

    def over(self):
        return "" if self._masters else "it has ended"

    def kept_status(self):
        return pb.JobStatus(phase="succeeded")


def test_a_job_is_followed_through_a_change_of_masters_each_entry_once_and_at_its_end_what_was_kept(monkeypatch):
    """The first has told an entry that it had not saved, and its successor has others in its place. The last entry and status came over no stream."""
    first = [entry(number) for number in (1, 2, 3)]
    second = [*first[:-1], entry(NUMBERS + 1), "damaged", entry(NUMBERS + 2)]
    masters = (["running"], first), ([], second), (["waiting"], second)
    job = Masters(monkeypatch, *masters, kept=[UnreachableError(BUSY), [*second, entry(NUMBERS + 3)]])
    with job.following(statuses=True) as following:
        heard = [each for each in following if each is not None]
    assert [each.phase for each in heard if not isinstance(each, str)] == ["running", "waiting", "succeeded"]
    assert [each for each in heard if isinstance(each, str)] == [*first, second[2], second[4], entry(NUMBERS + 3)]


def test_while_a_master_hangs_as_its_job_ends_whoever_follows_is_told_its_end(monkeypatch):
    hung_up, begun = threading.Event(), threading.Event()

    def hang(*_, **__):
        begun.set()
        hung_up.wait()
        return ()

    class Hanging(Masters):
        reached = contextmanager(lambda _: iter([SimpleNamespace(events=hang, watch=hang, close=hung_up.set)]))

        def over(self):
            begun.wait()
            return "it has ended"

    monkeypatch.setattr(job_handle, "JOIN_SECONDS", 0.1)
    with Hanging(monkeypatch).following(statuses=True) as following:
        assert [each.phase for each in following if isinstance(each, pb.JobStatus)] == ["succeeded"]
    assert hung_up.is_set()


def test_a_right_that_is_missing_now_and_then_is_waited_for_each_time(monkeypatch):
    turns = iter([UserError("no"), None] * 2)

    class Rights(Masters):
        @contextmanager
        def reached(self):
            if turn := next(turns, None):
                raise turn
            yield self

        def events(self, after, *, follow):
            time.sleep(0.3)
            self._masters.pop()
            return super().events(after, follow=follow)

    monkeypatch.setattr(job_handle, "REFUSED_SECONDS", 0.2)
    lines = [entry(1), entry(2)]
    job = Rights(monkeypatch, ((), lines[:1]), ((), lines), kept=[lines])
    with job.following(statuses=False) as following:
        assert [each for each in following if each is not None] == lines


def test_a_master_that_writes_how_the_job_has_ended_as_it_goes_is_heard(monkeypatch):
    texts = iter(['{"phase": "running"}', '{"phase": "stopped"}'])

    class Ends(JobHandle):
        name = "one"

        def status_text(self):
            return next(texts)

        def over(self):
            return "its master died"

        def reach(self):
            raise AbsentError("it is gone")

    assert Ends().status().phase == "stopped"
