"""Submitting a job and following it: what ``train`` and ``run`` do when there is an image.

The job does not depend on who follows it: a signal ends the following, not the job. While there is no master to be asked,
what is the matter with it is shown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from elasticdl.cli.cluster.cluster_job import ClusterJob, wait_until_gone
from elasticdl.cli.cluster.job_streams import Told
from elasticdl.cli.cluster.pod_prints import PodPrints
from elasticdl.cli.cluster.submission import Submission, make_parts
from elasticdl.cli.job_handle import made_up_name
from elasticdl.cli.master_client import connect as connect_master
from elasticdl.cli.outlets import own_outlets, tell
from elasticdl.cli.printed import printing
from elasticdl.cli.screens import Printing, Screen, open_screen
from elasticdl.cli.signals import SignalLog, caught, interrupt
from elasticdl.cli.status_watch import POLL, JobWatch, show_end, show_news, watched
from elasticdl.common.environment import refuse_variables
from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.job.journal import Entry, parse_entry
from elasticdl.job.option_values import ranks_of
from elasticdl.job.quantities import parse_envs, parse_secret_envs
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import Client, connect, namespace_of
from elasticdl.kube.job_pods import find_master, is_running
from elasticdl.kube.kubeconfig import Place
from elasticdl.kube.manifests import job_objects
from elasticdl.kube.manifests.job_objects import Parts
from elasticdl.kube.manifests.names import master_name, without_name
from elasticdl.kube.manifests.pod_status import MasterTrouble, trouble_of
from elasticdl.kube.manifests.yaml_text import as_yaml

LOOK_SECONDS = 1.0  # between two looks at a master that is not heard of
UNREACHED_SECONDS = 10.0  # a master that has just been started takes some of them to listen
CLOSING_TIME = 30.0  # for the master to write how the job has ended
# A master that ends so often without ever having got to work will not do better.
STARTS = 3


def run_job(spec: JobSpec, *, yaml: str, dry_run: bool, detach: bool) -> int:
    """Returns the exit code. ``yaml``: the file that the objects are written to instead.

    Raises:
        UserError: something is wrong with the job; nothing was started, and nothing stays.
        JobFailedError: the job failed.
        UnreachableError: the cluster does not answer.
        Interrupted: a signal came; once the job is submitted, it goes on.
    """
    refuse_variables(parse_envs(spec.envs))
    refuse_variables({each.name: "" for each in parse_secret_envs(spec.env_from_secret)})
    if yaml and spec.ttl != JobSpec.model_fields["ttl"].default:
        raise UserError(
            "--ttl takes away what a Job owns, and what is applied from the file of --yaml it does not: leave it out"
        )
    place = Place(spec.namespace, spec.kube_context)
    if yaml and not dry_run:  # no cluster is asked
        return _write(make_parts(_named(spec, None), namespace_of(place), datetime.now(UTC)), yaml)
    with caught(interrupt):
        client = connect(place)
        parts = make_parts(_named(spec, client), client.namespace, datetime.now(UTC))
        submission = Submission(client, parts, tell).within_rights()
        submission.check()
        parts = submission.parts
    if yaml:
        return _write(parts, yaml)
    if dry_run:
        print(_dumped(parts), end="")
        return 0
    signals = SignalLog()
    with caught(signals.add_or_raise):
        submission.make(signals.raise_first)
    job = ClusterJob(client, parts.spec.job_name, place)
    tell(f"job {job.name} submitted to {job.whereabouts}; see `elasticdl status {job.name}{place.flags}`")
    signals.raise_first()
    return 0 if detach else follow(job, parts.spec)


def _named(spec: JobSpec, client: Client | None) -> JobSpec:
    """The same job with a name that is not taken."""

    def is_taken(name: str) -> bool:
        return client is not None and client.find("Job", master_name(name)) is not None

    return spec.model_copy(update={"job_name": spec.job_name or made_up_name(is_taken)})


def _write(parts: Parts, file: str) -> int:
    """The objects as a file that somebody else applies."""
    text = _dumped(parts)
    try:
        Path(file).unlink(missing_ok=True)  # whoever could read an old one must not read the keys
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(text)
    except OSError as error:
        raise UserError(f"--yaml {file}: {error.strerror}") from None
    name = parts.spec.job_name
    print(f"job {name} written to {file}, with its secret keys: `kubectl apply -f {file}` starts it")
    print("apply this file only: each --yaml makes other keys, which the cluster refuses as long as the job is there")
    return 0


def _dumped(parts: Parts) -> str:
    return as_yaml([*job_objects.companions(parts), job_objects.make_job(parts)])


def follow(job: ClusterJob, spec: JobSpec) -> int:
    """Until the job has ended; returns the exit code.

    Raises:
        UserError: its image can't be had; the job was deleted again.
        JobFailedError: it failed, was stopped or is lost.
        Interrupted: by a signal; the job goes on.
    """
    signals = SignalLog()
    # Of a module's worker the log is its own, from which what the module prints can't be told here.
    ranks = ranks_of(spec.log_ranks) if spec.command else ()
    with (
        caught(signals.add),
        job.endpoint() as endpoint,
        connect_master(endpoint) as client,
        open_screen(spec.log_loss_steps, Printing(*own_outlets())) as screen,
        printing(PodPrints(job.client, job.name, ranks, screen), wait=lambda: signals.first is None) as prints,
        watched(client, client.watch, partial(client.events, follow=True)) as watch,
    ):
        Following(job, screen, watch, signals, spec.image_timeout, prints.hear).run()
    if signals.first is not None:
        tell(f"job {job.name} goes on: `elasticdl stop {job.name}{job.place.flags}` stops it")
        signals.raise_first()
    status = job.status()
    journal = filter(None, map(parse_entry, job.state().journal.splitlines()))
    show_end(status, journal, spec.output, prints.has_shown)
    if status.phase != "succeeded":
        there = job.client.find("Job", master_name(job.name)) is not None
        logs = f"; all logs: `elasticdl logs {job.name}{job.place.flags}`" if there else ""
        raise JobFailedError(f"job {job.name} {status.phase}: {status.reason}{logs}")
    return 0


class Lasting:
    """For how many seconds something has been so without a break."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, holds: bool, now: float) -> float:
        """To be told at every look; 0 while it does not hold."""
        self._since = (now if self._since is None else self._since) if holds else None
        return 0.0 if self._since is None else now - self._since


@dataclass(slots=True)
class Following:
    job: ClusterJob
    screen: Screen
    watch: JobWatch
    signals: SignalLog
    image_timeout: float
    hear: Callable[[Entry], None] = lambda entry: None
    told: Told = field(default_factory=Told)
    trouble: MasterTrouble = field(default_factory=lambda: MasterTrouble(""))  # as last shown
    without_image: Lasting = field(default_factory=Lasting)
    unreached: Lasting = field(default_factory=Lasting)
    unreached_told: bool = False

    def run(self) -> None:
        """Until the job is over, and its master has written how, or a signal came."""
        look_at = time.monotonic() + LOOK_SECONDS
        while self.signals.first is None and self.watch.goes_on():
            heard = self.watch.next()
            if isinstance(heard, str):
                self._tell_news([heard])
            elif heard is not None:
                self.show_contact()
                self.screen.show(heard)
                look_at = time.monotonic() + 5 * LOOK_SECONDS
            elif time.monotonic() >= look_at:
                if self.look(time.monotonic()):
                    break
                look_at = time.monotonic() + LOOK_SECONDS
        self._see_off()

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
            trouble = trouble_of(pod) if pod is not None else MasterTrouble(self.refusal())
            failures = job.client.read("Job", master_name(job.name)).get("status", {}).get("failed", 0)
            begun = job.state().memory
        except UnreachableError as error:
            trouble, failures, begun = MasterTrouble(str(error)), 0, "unknown"
        self.show_trouble(trouble)
        if self.gives_up(trouble, now) and not begun:
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

    def gives_up(self, trouble: MasterTrouble, now: float) -> bool:
        """Whether the image has been missing for too long, or will not come at all."""
        seconds = self.without_image.seconds(trouble.image is not None, now)
        return trouble.image is not None and (trouble.image.lasting or seconds >= self.image_timeout)

    def show_trouble(self, trouble: MasterTrouble) -> None:
        """An image that is tried for again and again is told of once."""
        before, self.trouble = self.trouble, trouble
        if trouble.reason != before.reason and not (trouble.image and before.image):
            self.screen.line(trouble.reason)

    def show_contact(self, failure: str = "", now: float = 0.0) -> None:
        """``failure``: why a master that runs does not answer; empty if it does."""
        lost = self.unreached.seconds(bool(failure), now) >= UNREACHED_SECONDS
        if lost and not self.unreached_told:
            self.unreached_told = True
            why = self.job.missing_right() or failure
            self.screen.line(f"its master runs but can't be reached: {why}; it is tried again")
        if not failure and self.unreached_told:
            self.unreached_told = False
            self.screen.line("its master is reached again")

    def refusal(self) -> str:
        """Why the cluster makes no pod for the master."""
        involved = f"involvedObject.kind=Job,involvedObject.name={master_name(self.job.name)}"
        events = self.job.client.list("Event", field_selector=f"{involved},reason=FailedCreate")
        newest = max(events, key=lambda event: str(event.get("lastTimestamp")), default=None)
        if newest is None:
            return trouble_of(None).reason
        return f"the cluster does not take its master's pod: {without_name(str(newest['message']))}"

    def _see_off(self) -> None:
        """Wait until the master has written how the job has ended, unless somebody is impatient."""
        deadline = time.monotonic() + CLOSING_TIME
        while self.signals.first is None and time.monotonic() < deadline:
            try:
                self.job.wait_until_over(POLL)
                return self._tell_news(self.job.state().journal.splitlines())
            except UnreachableError:
                time.sleep(POLL)
        return None

    def _tell_news(self, lines: Iterable[str]) -> None:
        for line in filter(self.told.is_new, lines):
            show_news([line], self.screen)
            if (entry := parse_entry(line)) is not None:
                self.hear(entry)
