"""Following a job on a cluster: as on this machine, but the job does not depend on it.

A signal ends the following, not the job. While there is no master to be asked, what is the matter with it is shown.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from collections.abc import Iterable

from elasticdl.cli.client import connect
from elasticdl.cli.follow import Inbox, WatchEnded, watching
from elasticdl.cli.handle import Growing
from elasticdl.cli.kubernetes.delete import wait_until_gone
from elasticdl.cli.kubernetes.job import ClusterJob
from elasticdl.cli.kubernetes.plight import ImagePatience, Plight, plight_of
from elasticdl.cli.launch import make_screen
from elasticdl.cli.panel import Screen
from elasticdl.cli.signals import Interrupted, SignalLog, caught
from elasticdl.cli.text import news, summary_lines
from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.common.spec import JobSpec
from elasticdl.kubernetes.job_pods import find_master, is_running
from elasticdl.kubernetes.manifests.names import master_name, without_name

POLL = 0.1
LOOK_SECONDS = 1.0  # between two looks at a master that is not heard of
CLOSING_TIME = 30.0  # for the master to write its last word
# A master that ends so often without ever having got to work will not do better.
STARTS = 3


def follow(job: ClusterJob, spec: JobSpec) -> int:
    """Until the job has ended; returns the exit code.

    Raises:
        UserError: its image can't be had; the job was deleted again.
        JobFailedError: it failed, was stopped or is lost.
        Interrupted: by a signal; the job goes on.
    """
    signals = SignalLog()
    inbox: Inbox = queue.SimpleQueue()
    with caught(signals.add):
        with (
            job.endpoint() as endpoint,
            connect(endpoint) as client,
            job.journal(follow=True) as journal,
            make_screen(spec.log_loss_steps) as screen,
            watching(client, inbox),
        ):
            _show(job, _View(screen, journal), inbox, signals, ImagePatience(spec.image_timeout))
        if signals.first is None:
            _see_off(job, signals)
    if signals.first is not None:
        flags = job.place.flags
        print(f"job {job.name} goes on: `elasticdl stop {job.name}{flags}` stops it", flush=True)
        raise Interrupted(signals.first)
    return _report(job, spec)


class _View:
    """The screen, and what of the journal is on it."""

    def __init__(self, screen: Screen, journal: Growing) -> None:
        self.screen = screen
        self._journal = journal
        self._plight = Plight("")

    def show_news(self) -> None:
        for line in self._journal.lines():
            if (text := news(json.loads(line))) is not None:
                self.screen.line(text)

    def show_plight(self, plight: Plight) -> None:
        """An image that is tried for again and again is told of once."""
        before, self._plight = self._plight, plight
        if plight.reason != before.reason and not (plight.image and before.image):
            self.screen.line(plight.reason)


def _show(job: ClusterJob, view: _View, inbox: Inbox, signals: SignalLog, patience: ImagePatience) -> None:
    """Until the job is over, or a signal came."""
    look_at = time.monotonic() + LOOK_SECONDS
    while signals.first is None:
        view.show_news()
        try:
            status = inbox.get(timeout=POLL)
        except queue.Empty:
            if time.monotonic() >= look_at:
                if _look(job, view, patience):
                    break
                look_at = time.monotonic() + LOOK_SECONDS
            continue
        if isinstance(status, WatchEnded):
            break
        view.screen.show(status)
        look_at = time.monotonic() + 5 * LOOK_SECONDS
    view.show_news()


def _look(job: ClusterJob, view: _View, patience: ImagePatience) -> bool:
    """Whether the job has ended; shows why its master is not heard of."""
    try:
        if job.has_ended():
            return True
        pod = find_master(job.cluster, job.name)
        if is_running(pod):
            return False
        plight = plight_of(pod) if pod is not None else Plight(_refusal(job))
        failures = job.cluster.read("Job", master_name(job.name)).get("status", {}).get("failed", 0)
        begun = job.state().memory
    except UnreachableError as error:
        plight, failures, begun = Plight(str(error)), 0, "unknown"
    view.show_plight(plight)
    if patience.is_over(plight, time.monotonic()) and not begun:
        job.cluster.delete("Job", master_name(job.name))
        wait_until_gone(job.cluster, job.name)
        raise UserError(f"job {job.name}: {plight.reason}; nothing of the job was left behind")
    if failures >= STARTS and not begun:
        where = f"{job.name}{job.place.flags}"
        raise JobFailedError(
            f"job {job.name}: {plight.reason}, {failures} times; see `elasticdl logs {where}`, "
            f"and remove it with `elasticdl delete {where}`"
        )
    return False


def _refusal(job: ClusterJob) -> str:
    """Why the cluster makes no pod for the master."""
    selection = f"involvedObject.kind=Job,involvedObject.name={master_name(job.name)},reason=FailedCreate"
    events = job.cluster.list("Event", field_selector=selection)
    newest = max(events, key=lambda event: str(event.get("lastTimestamp")), default=None)
    if newest is None:
        return plight_of(None).reason
    return f"the cluster does not take its master's pod: {without_name(str(newest['message']))}"


def _see_off(job: ClusterJob, signals: SignalLog) -> None:
    """Wait for the master's last word, unless somebody is impatient."""
    deadline = time.monotonic() + CLOSING_TIME
    while signals.first is None and time.monotonic() < deadline:
        try:
            job.wait_until_over(POLL)
            return
        except UnreachableError:
            time.sleep(POLL)


def _report(job: ClusterJob, spec: JobSpec) -> int:
    status = job.status()
    flags = job.place.flags
    if status.phase == "failed" and status.traceback:
        print(status.traceback.rstrip(), file=sys.stderr)
    if status.phase in ("succeeded", "stopped"):
        for line in summary_lines(status, _entries(job), spec.output):
            print(line)
        sys.stdout.flush()
    if status.phase != "succeeded":
        there = job.cluster.find("Job", master_name(job.name)) is not None
        logs = f"; all logs: `elasticdl logs {job.name}{flags}`" if there else ""
        raise JobFailedError(f"job {job.name} {status.phase}: {status.reason}{logs}")
    return 0


def _entries(job: ClusterJob) -> Iterable[dict[str, object]]:
    return [json.loads(line) for line in job.state().journal.splitlines()]
