"""Submitting a job and following it: what ``train`` and ``run`` do when there is an image.

The job does not depend on who follows it: a signal ends the following, not the job.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from elasticdl.cli.cluster.namespace_job import NamespaceJob
from elasticdl.cli.cluster.pod_logs import PodPrinters
from elasticdl.cli.cluster.submission import Submission, make_parts
from elasticdl.cli.course import Follower, Watch, follow
from elasticdl.cli.follow import Following
from elasticdl.cli.job_names import made_up_name
from elasticdl.cli.printed import Prints
from elasticdl.cli.screens import Screen, tell
from elasticdl.cli.signals import SignalLog, caught, interrupt
from elasticdl.cli.wording import insists
from elasticdl.common.environment import refuse_variables
from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.job.quantities import parse_envs, parse_secret_envs
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import Client, connect, namespace_of
from elasticdl.kube.job_pods import find_master, is_running
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.manifests import job_objects
from elasticdl.kube.manifests.job_objects import ManifestInputs
from elasticdl.kube.manifests.names import master_name, without_name
from elasticdl.kube.manifests.pod_status import MasterTrouble, trouble_of
from elasticdl.kube.manifests.yaml_text import as_yaml
from elasticdl.proto import elasticdl_pb2 as pb

LOOK_SECONDS = 1.0  # between two looks at a master that is not heard of
QUIET_SECONDS = 5.0  # that a master is not looked at after it was heard of
UNREACHED_SECONDS = 10.0  # a master that has just been started takes some of them to listen
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
    place = ClusterTarget(spec.namespace, spec.kube_context)
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
    # Commands without a place mean a job of this machine that has the same name.
    handle = NamespaceJob(client, parts.spec.job_name, ClusterTarget(client.namespace, spec.kube_context))
    see = f"`elasticdl status {handle.name}{handle.flags}`{insists(parts.spec, handle.name, handle.flags)}"
    tell(f"job {handle.name} submitted to {handle.whereabouts}; see {see}")
    signals.raise_first()
    return 0 if detach else follow_submitted(handle, parts.spec)


def _named(spec: JobSpec, client: Client | None) -> JobSpec:
    """The same job with a name that is not taken."""

    def is_taken(name: str) -> bool:
        return client is not None and client.find("Job", master_name(name)) is not None

    return spec.model_copy(update={"job_name": spec.job_name or made_up_name(is_taken)})


def _write(parts: ManifestInputs, file: str) -> int:
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


def _dumped(parts: ManifestInputs) -> str:
    return as_yaml([*job_objects.companions(parts), job_objects.make_job(parts)])


def follow_submitted(handle: NamespaceJob, spec: JobSpec) -> int:
    """Until the job has ended; returns the exit code. What is the matter with its master is shown while that is not heard of.

    Raises:
        JobFailedError: it failed, was stopped or is lost; or its master does not get to work, as without its image.
        Interrupted: by a signal; the job goes on.
    """
    # Of a module's worker the log is its own, from which what the module prints can't be told here.
    ranks = spec.shown_ranks() if spec.command else ()

    def watch(screen: Screen, following: Following) -> Watch:
        masters = MasterWatch(handle, screen, spec.image_timeout, look_at=time.monotonic() + LOOK_SECONDS)
        return lambda heard: masters.hear(heard, following.failure, time.monotonic())

    follower = Follower(
        prints=lambda screen: Prints(ranks, screen, PodPrinters(handle.client, handle.name)),
        watch=watch,
        farewell=f"job {handle.name} goes on: `elasticdl stop {handle.name}{handle.flags}` stops it",
    )
    return follow(handle, spec, follower)


class Stopwatch:
    """For how many seconds something has been so without a break."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self, holds: bool, now: float) -> float:
        """To be told at every look; 0 while it does not hold."""
        self._since = (now if self._since is None else self._since) if holds else None
        return 0.0 if self._since is None else now - self._since


@dataclass(slots=True)
class MasterWatch:
    handle: NamespaceJob
    screen: Screen
    image_timeout: float
    trouble: MasterTrouble = field(default_factory=lambda: MasterTrouble(""))  # as last shown
    without_image: Stopwatch = field(default_factory=Stopwatch)
    unreached: Stopwatch = field(default_factory=Stopwatch)
    unreached_told: bool = False
    look_at: float = 0.0

    def hear(self, heard: object, failure: str, now: float) -> None:
        """Of a job that is followed: what has come of it, if anything; and why nothing does at the moment, if its master fails to answer.

        Raises:
            JobFailedError: its master does not get to work, as without its image.
        """
        if isinstance(heard, pb.JobStatus):
            self.show_contact()
            self.look_at = now + QUIET_SECONDS
        elif heard is None and now >= self.look_at:
            self.look(failure, now)
            self.look_at = now + LOOK_SECONDS

    def look(self, failure: str, now: float) -> None:
        handle = self.handle
        try:
            pod = find_master(handle.client, handle.name)
            if is_running(pod):
                return self.show_contact(failure, now)
            if handle.over():
                return None
            trouble = trouble_of(pod) if pod is not None else MasterTrouble(self.refusal())
            failures = handle.client.read("Job", master_name(handle.name)).get("status", {}).get("failed", 0)
            begun = handle.state().memory
        except UnreachableError as error:
            trouble, failures, begun = MasterTrouble(str(error)), 0, "unknown"
        self.show_trouble(trouble)
        crashes, where = failures >= STARTS, f"{handle.name}{handle.flags}"
        if (crashes or self.gives_up(trouble, now)) and not begun:
            more = f", {failures} times; see `elasticdl logs {where}`" if crashes else ""
            raise JobFailedError(f"job {handle.name}: {trouble.reason}{more}; `elasticdl delete {where}` removes it")
        return None

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
            why = self.handle.missing_right() or failure
            self.screen.line(f"its master runs but can't be reached: {why}; it is tried again")
        if not failure and self.unreached_told:
            self.unreached_told = False
            self.screen.line("its master is reached again")

    def refusal(self) -> str:
        """Why the cluster makes no pod for the master."""
        involved = f"involvedObject.kind=Job,involvedObject.name={master_name(self.handle.name)}"
        events = self.handle.client.list("Event", field_selector=f"{involved},reason=FailedCreate")
        newest = max(events, key=lambda event: str(event.get("lastTimestamp")), default=None)
        if newest is None:
            return trouble_of(None).reason
        return f"the cluster does not take its master's pod: {without_name(str(newest['message']))}"
