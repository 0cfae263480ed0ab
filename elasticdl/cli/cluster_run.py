"""Submitting a job and following it: what ``train`` and ``run`` do when there is an image.

The job does not depend on who follows it: a signal ends the following, not the job.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from elasticdl.cli.follow import Follower, Prints, follow
from elasticdl.cli.namespace_job import NamespaceJob, NoMasterError
from elasticdl.cli.parsing import made_up_name
from elasticdl.cli.pod_logs import PodPrinters
from elasticdl.cli.screens import tell
from elasticdl.cli.signals import SignalLog, caught, interrupt
from elasticdl.common.certificates import issue
from elasticdl.common.credentials import Role, refuse_variables
from elasticdl.common.errors import ElasticDLError, JobFailedError, UnreachableError, UserError
from elasticdl.job.quantities import (
    KUEUE,
    VOLCANO,
    parse_envs,
    parse_priority,
    parse_queue,
    parse_secret_envs,
    parse_volumes,
)
from elasticdl.job.spec import JobSpec
from elasticdl.kube import manifests
from elasticdl.kube.client import (
    ABSENT,
    CLUSTER_WIDE,
    CONFLICT,
    FORBIDDEN,
    STRANGER,
    Client,
    NotDoneError,
    NotThereError,
    Object,
    connect,
    namespace_of,
)
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.manifests import Manifest, ManifestInputs, as_yaml, master_template, merge, worker_template
from elasticdl.kube.names import VOLCANO_GROUP, master_name, without_name

# Submitting a job: first it is asked whether its pods would be taken, then all of it is made, or none.
#
# The Job is made first, as the owner of the rest, but with nothing to start; when all is there its master is let go. If
# anything is refused, the Job is deleted; what it owns follows within a second or two.


# What a cluster serves that has such a scheduler.
QUEUE_GROUPS = {KUEUE: "kueue.x-k8s.io", VOLCANO: "scheduling.volcano.sh"}
# What many a user may not make, and need not if there is one of each for them.
_ACCOUNT_KINDS = ("ServiceAccount", "Role", "RoleBinding")
# There is one in every namespace, by itself.
_ANY_ACCOUNT = {"spec": {"serviceAccountName": "default"}}


def make_parts(spec: JobSpec, namespace: str, now: datetime) -> ManifestInputs:
    """Everything that the job's objects are made from; ``spec`` has a name.

    Raises:
        UserError: the user's pod template is wrong.
    """
    worker = worker_template(spec, namespace)
    return ManifestInputs(spec, namespace, master_template(spec, worker), worker, issue(spec.job_name, now))


@dataclass(slots=True)
class Submission:
    """``say`` is told what the user should know, a line each."""

    client: Client
    parts: ManifestInputs
    say: Callable[[str], None]

    def check(self) -> None:
        """Whether the name is free, and the cluster would take the pods; nothing is made. `parts` then have no object
        that the cluster does not know.

        Raises:
            UserError: it would not.
        """
        spec = self.parts.spec
        if self.client.find("Job", master_name(spec.job_name)) is not None:
            raise UserError(self._taken("Job", master_name(spec.job_name)))
        if not self.client.may("delete", "jobs", "batch"):
            raise UserError(f"you may not delete jobs in namespace {self.client.namespace}")
        for claim in sorted({volume.claim_name for volume in parse_volumes(spec.volume) if volume.claim_name}):
            self._require("PersistentVolumeClaim", claim, "--volume")
        for secret in sorted({each.secret for each in parse_secret_envs(spec.env_from_secret)}):
            self._require("Secret", secret, "--env_from_secret")
        if spec.service_account:
            self._require("ServiceAccount", spec.service_account, "--service_account")
        if queue := parse_queue(spec.queue):
            if not self.client.serves(QUEUE_GROUPS[queue.scheduler]):
                self.parts = replace(self.parts, groups=False)
                self.say(f"warning: --queue {spec.queue}: the cluster has no {queue.scheduler.capitalize()} to heed it")
            elif queue.scheduler == VOLCANO:  # which leaves the pods of an unknown queue alone, without a word
                self._require("Queue", queue.name, "--queue")
        self._try_workers()  # first, as the master may have its class from them
        self._try_master()

    def make(self, pause: Callable[[], None] = lambda: None) -> None:
        """Make everything and let the master start; if anything goes wrong, nothing stays.

        ``pause`` is called between two requests, and may raise.

        Raises:
            UserError: the cluster refuses something.
            UnreachableError: it does not answer any more.
        """
        manifest = manifests.make_job(self.parts, submitted=True)
        name, job = manifest["metadata"]["name"], None
        try:
            job = self._make(manifest)
            for manifest in manifests.companions(self.parts):
                pause()
                self._make(manifests.owned(manifest, job))
            pause()
            self.client.patch("Job", name, {"spec": {"parallelism": 1}})
        except BaseException as error:
            if job or not isinstance(error, NotDoneError):  # else there is no Job, or the name is that of another one
                self._unmake(name)
            raise

    def _make(self, manifest: Manifest) -> Object:
        try:
            return self.client.create(manifest)
        except NotDoneError as error:
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            if error.status == CONFLICT:
                raise NotDoneError(CONFLICT, self._taken(kind, name)) from error
            if error.status in (ABSENT, STRANGER):
                raise
            text = str(error) if error.by_rights else f"the cluster refuses the {kind} {name}: {error}"
            if error.status == FORBIDDEN and kind in _ACCOUNT_KINDS and not error.by_quota:
                text += "; an account that somebody has made for the master can be named with --service_account"
            raise NotDoneError(error.status, text) from error

    def _unmake(self, job: str) -> None:
        try:
            self.client.delete("Job", job)
        except ElasticDLError as error:
            remedy = f"`elasticdl delete {self.parts.spec.job_name} --namespace {self.client.namespace}`"
            self.say(f"warning: Job {job} could not be deleted again: {error}; {remedy} removes what is left")

    def _taken(self, kind: str, name: str) -> str:
        job, namespace = self.parts.spec.job_name, self.client.namespace
        if kind == "Job":
            return (
                f"there is a job named {job} in namespace {namespace} already: choose another --job_name, "
                f"or remove it with `elasticdl delete {job} --namespace {namespace}`"
            )
        return f"there is a {kind} {name} in namespace {namespace} that is not this job's: choose another --job_name"

    def _require(self, kind: str, name: str, option: str) -> None:
        """Whoever may not look has to do without being told."""
        try:
            found = self.client.find(kind, name)
        except NotDoneError as error:
            if not error.by_rights:
                raise
        else:
            if found is None:
                where = "the cluster" if kind in CLUSTER_WIDE else f"namespace {self.client.namespace}"
                raise UserError(f"{option}: there is no {kind} {name} in {where}")

    def _try_master(self) -> None:
        """An account that is not made yet has another one stand in for it, if the cluster will have that."""
        if self.parts.spec.service_account:
            return self._try_pod(self.parts.master, Role.MASTER)
        try:
            self._try_pod(merge(self.parts.master, _ANY_ACCOUNT), Role.MASTER)
        except NotDoneError as error:
            if "service account" not in str(error):
                raise

    def _try_workers(self) -> None:
        urgent = parse_priority(self.parts.spec.worker_pod_priority)  # of some or all of them
        priority = {"priorityClassName": urgent.class_name} if urgent else {}
        # Volcano refuses a pod whose group is not there, and that is made with the rest.
        alone = {"metadata": {"annotations": {VOLCANO_GROUP: None}}}
        try:
            self._try_pod(merge(self.parts.worker, {**alone, "spec": priority}), Role.WORKER)
        except NotDoneError as error:
            if not error.by_quota:
                raise
            self.say(f"warning: as things are, no worker has a place in the namespace's quota: {error}")

    def _try_pod(self, pod: Manifest, role: Role) -> None:
        """Raises NotDoneError if the cluster refuses such a pod; who may make none can't ask."""
        try:
            self.client.create(manifests.pod_of(self.parts, pod, role), dry_run=True)
        except NotDoneError as error:
            if error.by_rights:
                return
            if error.status in (ABSENT, STRANGER):
                raise
            raise NotDoneError(
                error.status, f"the cluster refuses the {role}'s pod: {without_name(str(error))}"
            ) from error


LOOK_SECONDS = 1.0  # between two looks at a master that is not heard of
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
        submission = Submission(client, parts, tell)
        submission.check()
        parts = submission.parts
    if yaml:
        return _write(parts, yaml)
    if dry_run:
        print(_dumped(parts), end="")
        return 0
    signals = SignalLog()
    with caught(signals.add):
        submission.make(signals.raise_first)
    # Commands without a place mean a job of this machine that has the same name.
    handle = NamespaceJob(client, parts.spec.job_name, ClusterTarget(client.namespace, spec.kube_context))
    see = f"`elasticdl status {handle.name}{handle.flags}`"
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
    return as_yaml([*manifests.companions(parts), manifests.make_job(parts)])


def follow_submitted(handle: NamespaceJob, spec: JobSpec) -> int:
    """Until the job has ended; returns the exit code. What is the matter with its master is shown while that is not heard of.

    Raises:
        JobFailedError: it failed, was stopped or is lost; or its master does not get to work, as without its image.
        Interrupted: by a signal; the job goes on.
    """
    # Of a module's worker the log is its own, from which what the module prints can't be told here.
    ranks = spec.shown_ranks() if spec.command else ()

    masters = MasterWatch(handle, spec.image_timeout)
    follower = Follower(
        prints=lambda screen: Prints(ranks, screen, PodPrinters(handle.client, handle.name)),
        watch=lambda _, following: lambda heard: masters.look(following.failure, time.monotonic()),
        farewell=f"job {handle.name} goes on: `elasticdl stop {handle.name}{handle.flags}` stops it",
    )
    return follow(handle, spec, follower)


@dataclass(slots=True)
class MasterWatch:
    handle: NamespaceJob
    image_timeout: float
    look_at: float = 0.0
    imageless: float = math.inf  # since when its image is missing

    def look(self, failure: Exception | None, now: float) -> None:
        """Of a job that is followed; ``failure``: why no status is heard at the moment.

        Raises:
            JobFailedError: its master does not get to work, as without its image.
        """
        if not isinstance(failure, NoMasterError) or now < self.look_at:
            return
        self.look_at, why = now + LOOK_SECONDS, failure.why
        self.imageless = min(self.imageless, now) if why.image else math.inf
        name, where = self.handle.name, f"{self.handle.name}{self.handle.flags}"
        with suppress(UnreachableError, NotThereError):  # a job that was deleted is over, which is seen elsewhere
            failures = self.handle.client.read("Job", master_name(name)).get("status", {}).get("failed", 0)
            crashes, waited = failures >= STARTS, now - self.imageless >= self.image_timeout
            if (crashes or why.lasting or waited) and not self.handle.state().memory:
                more = f", {failures} times; see `elasticdl logs {where}`" if crashes else ""
                raise JobFailedError(f"job {name}: {why.reason}{more}; `elasticdl delete {where}` removes it")
