"""Submitting a job: first it is asked whether its pods would be taken, then all of it is made, or none.

The Job is made first, as the owner of the rest, but with nothing to start; when all is there its master is let go. If
anything is refused, the Job is deleted, and with it what it owns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from elasticdl.cli.signals import Interrupted
from elasticdl.common.certificates import issue
from elasticdl.common.credentials import Role
from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.job.quantities import KUEUE, VOLCANO, parse_priority, parse_queue, parse_secret_envs, parse_volumes
from elasticdl.job.spec import JobSpec
from elasticdl.kube.api_error import ABSENT, CONFLICT, FORBIDDEN, STRANGER, NotDoneError
from elasticdl.kube.client import CLUSTER_WIDE, Client, Object
from elasticdl.kube.manifests import job_objects
from elasticdl.kube.manifests.job_objects import ManifestInputs
from elasticdl.kube.manifests.merge import Manifest, merge, with_pod_templates
from elasticdl.kube.manifests.names import VOLCANO_GROUP, master_name, without_name
from elasticdl.kube.manifests.pod import (
    as_urgent,
    finish_master_pod,
    finish_pod,
    master_pod,
    volcano_group,
    worker_pod,
)

# What a Job owned is gone a second or two after it.
GONE_SECONDS = 10.0
_POLL = 0.1
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
    worker = finish_pod(with_pod_templates(worker_pod(spec, namespace), spec, Role.WORKER), spec, Role.WORKER)
    master = finish_master_pod(with_pod_templates(master_pod(spec), spec, Role.MASTER), spec)
    return ManifestInputs(
        spec=spec,
        namespace=namespace,
        master=as_urgent(master, worker),
        worker=worker,
        certificates=issue(spec.job_name, now),
    )


@dataclass(frozen=True, slots=True)
class Submission:
    """``say`` is told what the user should know, a line each."""

    client: Client
    parts: ManifestInputs
    say: Callable[[str], None]

    def within_rights(self) -> Submission:
        """The same, with no right for the master that the user can't give it, and no object that the cluster does not know."""
        spec = self.parts.spec
        announces = bool(spec.service_account) or self.client.may("create", "events")
        groups = volcano_group(spec, self.parts.worker) is None or self.client.serves(QUEUE_GROUPS[VOLCANO])
        return replace(self, parts=replace(self.parts, announces=announces, groups=groups))

    def check(self) -> None:
        """Whether the name is free, and the cluster would take the pods; nothing is made.

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
        self._check_queue()
        self._try_workers()  # first, as the master may have its class from them
        self._try_master()
        if not self.parts.announces:
            self.say("warning: as you may not create events, the job's master can't tell `kubectl describe` of any")

    def make(self, pause: Callable[[], None] = lambda: None) -> None:
        """Make everything and let the master start; if anything goes wrong, nothing stays.

        ``pause`` is called between two requests, and may raise.

        Raises:
            UserError: the cluster refuses something.
            UnreachableError: it does not answer any more.
        """
        begun: list[Manifest] = []
        try:
            job = self._make(job_objects.make_job(self.parts, submitted=True), begun)
            for manifest in job_objects.companions(self.parts):
                pause()
                self._make(job_objects.owned(manifest, job), begun)
            pause()
            self.client.patch("Job", job["metadata"]["name"], {"spec": {"parallelism": 1}})
        except BaseException:
            if begun:
                self._unmake(begun)
            raise

    def _make(self, manifest: Manifest, begun: list[Manifest]) -> Object:
        """If the answer is lost it may have been made, under a name that was free a moment before."""
        begun.append(manifest)
        try:
            return self.client.create(manifest)
        except NotDoneError as error:
            begun.pop()
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            if error.status == CONFLICT:
                raise NotDoneError(CONFLICT, self._taken(kind, name)) from error
            if error.status in (ABSENT, STRANGER):
                raise
            text = str(error) if error.by_rights else f"the cluster refuses the {kind} {name}: {error}"
            if error.status == FORBIDDEN and kind in _ACCOUNT_KINDS and not error.by_quota:
                text += "; an account that somebody has made for the master can be named with --service_account"
            raise NotDoneError(error.status, text) from error

    def _unmake(self, begun: Sequence[Manifest]) -> None:
        """Returns when the names are free again."""
        job, deadline = begun[0]["metadata"]["name"], time.monotonic() + GONE_SECONDS
        try:
            while True:
                with suppress(Interrupted):  # whoever is impatient wants nothing left all the more
                    self.client.delete("Job", job)
                    break
            while begun and time.monotonic() < deadline:
                begun = [each for each in begun if self._is_there(each)]
                time.sleep(_POLL if begun else 0)
        except ElasticDLError as error:
            self.say(f"warning: Job {job} could not be deleted again: {error}")

    def _is_there(self, manifest: Manifest) -> bool:
        try:
            return self.client.find(manifest["kind"], manifest["metadata"]["name"]) is not None
        except NotDoneError:  # who may not look can't wait
            return False

    def _taken(self, kind: str, name: str) -> str:
        job, namespace = self.parts.spec.job_name, self.client.namespace
        if kind == "Job":
            return (
                f"there is a job named {job} in namespace {namespace} already: choose another --job_name, "
                f"or remove it with `elasticdl delete {job} --namespace {namespace}`"
            )
        return f"there is a {kind} {name} in namespace {namespace} that is not this job's: choose another --job_name"

    def _check_queue(self) -> None:
        queue = parse_queue(self.parts.spec.queue)
        if queue is None:
            return
        if not self.client.serves(QUEUE_GROUPS[queue.scheduler]):
            self.say(
                f"warning: --queue {self.parts.spec.queue}: the cluster has no {queue.scheduler.capitalize()} to heed it"
            )
        elif queue.scheduler == VOLCANO:  # which leaves the pods of an unknown queue alone, without a word
            self._require("Queue", queue.name, "--queue")

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
            self.client.create(job_objects.pod_of(self.parts, pod, role), dry_run=True)
        except NotDoneError as error:
            if error.by_rights:
                return
            if error.status in (ABSENT, STRANGER):
                raise
            raise NotDoneError(
                error.status, f"the cluster refuses the {role}'s pod: {without_name(str(error))}"
            ) from error
