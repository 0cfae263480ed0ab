"""Following a job on a cluster: as on this machine, but the job does not depend on it.

A signal ends the following, not the job. While there is no master to be asked, what is the matter with it is shown.
"""

from __future__ import annotations

import json
import queue
import time
from dataclasses import dataclass, field

from elasticdl.cli.cluster.cluster_job import ClusterJob
from elasticdl.cli.cluster.deletion import wait_until_gone
from elasticdl.cli.cluster.master_pod import Contact, ImagePatience, MasterTrouble, trouble_of
from elasticdl.cli.line_streams import LineStream
from elasticdl.cli.master_client import connect
from elasticdl.cli.screens import Screen, open_screen
from elasticdl.cli.signals import Interrupted, SignalLog, caught
from elasticdl.cli.status_watch import StatusWatch, WatchEnded, show_end, show_news
from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.common.spec import JobSpec
from elasticdl.kubernetes.job_pods import find_master, is_running
from elasticdl.kubernetes.manifests.names import master_name, without_name

POLL = 0.1
LOOK_SECONDS = 1.0  # between two looks at a master that is not heard of
CLOSING_TIME = 30.0  # for the master to write how the job has ended
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
    with caught(signals.add):
        with (
            job.endpoint() as endpoint,
            connect(endpoint) as client,
            job.journal(follow=True) as journal,
            open_screen(spec.log_loss_steps) as screen,
            StatusWatch(client) as watch,
        ):
            _Following(job, screen, journal, watch, signals, ImagePatience(spec.image_timeout)).run()
        if signals.first is None:
            _see_off(job, signals)
    if signals.first is not None:
        flags = job.place.flags
        print(f"job {job.name} goes on: `elasticdl stop {job.name}{flags}` stops it", flush=True)
        raise Interrupted(signals.first)
    return _report(job, spec)


@dataclass(slots=True)
class _Following:
    job: ClusterJob
    screen: Screen
    journal: LineStream
    watch: StatusWatch
    signals: SignalLog
    patience: ImagePatience
    contact: Contact = field(default_factory=Contact)
    trouble: MasterTrouble = field(default_factory=lambda: MasterTrouble(""))  # as last shown

    def run(self) -> None:
        """Until the job is over, or a signal came."""
        look_at = time.monotonic() + LOOK_SECONDS
        while self.signals.first is None:
            show_news(self.journal, self.screen)
            try:
                status = self.watch.inbox.get(timeout=POLL)
            except queue.Empty:
                if time.monotonic() >= look_at:
                    if self.look(time.monotonic()):
                        break
                    look_at = time.monotonic() + LOOK_SECONDS
                continue
            if isinstance(status, WatchEnded):
                break
            self.show_contact()
            self.screen.show(status)
            look_at = time.monotonic() + 5 * LOOK_SECONDS
        show_news(self.journal, self.screen)

    def look(self, now: float) -> bool:
        """Whether the job has ended; shows why its master is not heard of."""
        job = self.job
        try:
            if job.has_ended():
                return True
            pod = find_master(job.client, job.name)
            if is_running(pod):
                self.show_contact(self.watch.failure, now)
                return False
            trouble = trouble_of(pod) if pod is not None else MasterTrouble(_refusal(job))
            failures = job.client.read("Job", master_name(job.name)).get("status", {}).get("failed", 0)
            begun = job.state().memory
        except UnreachableError as error:
            trouble, failures, begun = MasterTrouble(str(error)), 0, "unknown"
        self.show_trouble(trouble)
        if self.patience.is_over(trouble, now) and not begun:
            job.client.delete("Job", master_name(job.name))
            wait_until_gone(job.client, job.name)
            raise UserError(f"job {job.name}: {trouble.reason}; nothing of the job was left behind")
        if failures >= STARTS and not begun:
            where = f"{job.name}{job.place.flags}"
            raise JobFailedError(
                f"job {job.name}: {trouble.reason}, {failures} times; see `elasticdl logs {where}`, "
                f"and remove it with `elasticdl delete {where}`"
            )
        return False

    def show_trouble(self, trouble: MasterTrouble) -> None:
        """An image that is tried for again and again is told of once."""
        before, self.trouble = self.trouble, trouble
        if trouble.reason != before.reason and not (trouble.image and before.image):
            self.screen.line(trouble.reason)

    def show_contact(self, failure: str = "", now: float = 0.0) -> None:
        """``failure``: why a master that runs does not answer; empty if it does."""
        if failure and self.contact.lost(now):
            why = self.job.missing_right() or failure
            self.screen.line(f"its master runs but can't be reached: {why}; it is tried again")
        if not failure and self.contact.restored():
            self.screen.line("its master is reached again")


def _refusal(job: ClusterJob) -> str:
    """Why the cluster makes no pod for the master."""
    selection = f"involvedObject.kind=Job,involvedObject.name={master_name(job.name)},reason=FailedCreate"
    events = job.client.list("Event", field_selector=selection)
    newest = max(events, key=lambda event: str(event.get("lastTimestamp")), default=None)
    if newest is None:
        return trouble_of(None).reason
    return f"the cluster does not take its master's pod: {without_name(str(newest['message']))}"


def _see_off(job: ClusterJob, signals: SignalLog) -> None:
    """Wait until the master has written how the job has ended, unless somebody is impatient."""
    deadline = time.monotonic() + CLOSING_TIME
    while signals.first is None and time.monotonic() < deadline:
        try:
            job.wait_until_over(POLL)
            return
        except UnreachableError:
            time.sleep(POLL)


def _report(job: ClusterJob, spec: JobSpec) -> int:
    status = job.status()
    show_end(status, map(json.loads, job.state().journal.splitlines()), spec.output)
    if status.phase != "succeeded":
        there = job.client.find("Job", master_name(job.name)) is not None
        logs = f"; all logs: `elasticdl logs {job.name}{job.place.flags}`" if there else ""
        raise JobFailedError(f"job {job.name} {status.phase}: {status.reason}{logs}")
    return 0
