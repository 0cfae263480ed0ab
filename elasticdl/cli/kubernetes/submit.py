"""Submitting a job: first it is asked whether everything would be taken, then all of it is made, or none.

The Job is made first, as the owner of the rest, but with nothing to start; when all is there its master is let go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from elasticdl.cli.kubernetes import objects
from elasticdl.cli.kubernetes.api import ABSENT, EXISTS, Cluster, NotDoneError, Object
from elasticdl.cli.kubernetes.cluster_spec import ClusterSpec
from elasticdl.cli.kubernetes.objects import Parts
from elasticdl.common.certificates import issue
from elasticdl.common.credentials import Role
from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.common.manifests.merge import merge
from elasticdl.common.manifests.pods import Manifest, fixed_labels
from elasticdl.common.manifests.template import read_pod_template
from elasticdl.common.manifests.worker import worker_template
from elasticdl.common.quantities import parse_volumes
from elasticdl.common.spec import JobSpec

# Older clusters take no pod of an account until it has a token, a moment after it was made.
TOKEN_SECONDS = 10.0
_RETRY_SECONDS = 0.1
# Whether a user may bind a role that is not there yet can't be told.
_NOT_TRIED = ("RoleBinding",)


def make_parts(spec: JobSpec, namespace: str, now: datetime) -> Parts:
    """Everything that the job's objects are made from; ``spec`` has a name.

    Raises:
        UserError: the user's pod template or cluster module is wrong.
    """
    template, cluster_spec = read_pod_template(spec.pod_template), ClusterSpec(spec.cluster_spec)

    def adapted(pod: Manifest, role: Role) -> Manifest:
        return merge(cluster_spec.adapt_pod(pod), {"metadata": {"labels": fixed_labels(spec, role)}})

    try:
        master = adapted(objects.master_pod(spec, template), Role.MASTER)
        worker = adapted(worker_template(spec, namespace, template), Role.WORKER)
    except ValueError as error:
        raise UserError(f"--pod_template {spec.pod_template}: {error}") from None
    return Parts(
        spec=spec,
        namespace=namespace,
        master=master,
        worker=worker,
        service=cluster_spec.adapt_service(objects.make_service(spec)),
        certificates=issue(spec.job_name, now),
    )


@dataclass(frozen=True, slots=True)
class Submission:
    """``say`` is told what the user should know, a line each."""

    cluster: Cluster
    parts: Parts
    say: Callable[[str], None]

    def check(self) -> None:
        """Whether the cluster would take it all; nothing is made.

        Raises:
            UserError: it would not.
        """
        spec = self.parts.spec
        for manifest in (objects.make_job(self.parts, parallelism=0), *objects.companions(self.parts)):
            if manifest["kind"] not in _NOT_TRIED:
                self._make(manifest, dry_run=True)
        for claim in sorted({volume.claim_name for volume in parse_volumes(spec.volume) if volume.claim_name}):
            self._require("PersistentVolumeClaim", claim, "--volume")
        if spec.service_account:
            self._require("ServiceAccount", spec.service_account, "--service_account")
            self._try_pod(self.parts.master, Role.MASTER)
        self._try_workers()

    def make(self) -> None:
        """Make everything and let the master start; if anything goes wrong, or a signal comes, nothing stays.

        Raises:
            UserError: the cluster refuses something.
            UnreachableError: it does not answer any more.
        """
        with self._undone_on_failure() as begun:
            job = self._make_one(objects.make_job(self.parts, parallelism=0), begun)
            for manifest in objects.companions(self.parts):
                self._make_one(objects.owned(manifest, job), begun)
            self._await_account()
            self.cluster.patch("Job", job["metadata"]["name"], {"spec": {"parallelism": 1}})

    def _make_one(self, manifest: Manifest, begun: list[Manifest]) -> Object:
        """If the answer is lost it may have been made, under a name that was free a moment before."""
        begun.append(manifest)
        try:
            return self._make(manifest)
        except NotDoneError:
            begun.pop()
            raise

    def _make(self, manifest: Manifest, *, dry_run: bool = False) -> Object:
        try:
            return self.cluster.create(manifest, dry_run=dry_run)
        except NotDoneError as error:
            kind, name = manifest["kind"], manifest["metadata"]["name"]
            if error.status == EXISTS:
                raise NotDoneError(EXISTS, self._taken(kind, name)) from error
            if error.status == ABSENT or error.by_rights:
                raise
            raise NotDoneError(error.status, f"the cluster refuses the {kind} {name}: {error}") from error

    def _taken(self, kind: str, name: str) -> str:
        job, namespace = self.parts.spec.job_name, self.cluster.namespace
        if kind == "Job":
            return (
                f"there is a job named {job} in namespace {namespace} already: choose another --job_name, "
                f"or remove it with `elasticdl delete {job} --namespace {namespace}`"
            )
        return f"there is a {kind} {name} in namespace {namespace} that is not this job's: choose another --job_name"

    def _require(self, kind: str, name: str, option: str) -> None:
        """Whoever may not look has to do without being told."""
        try:
            found = self.cluster.find(kind, name)
        except NotDoneError as error:
            if not error.by_rights:
                raise
        else:
            if found is None:
                raise UserError(f"{option}: there is no {kind} {name} in namespace {self.cluster.namespace}")

    def _try_workers(self) -> None:
        spec = self.parts.spec
        priority = {"priorityClassName": name} if (name := objects.urgent_class(spec)) else {}
        try:
            self._try_pod(merge(self.parts.worker, {"spec": priority}), Role.WORKER)
        except NotDoneError as error:
            if not error.by_quota:
                raise
            self.say(f"warning: as things are, no worker has a place in the namespace's quota: {error}")

    def _try_pod(self, pod: Manifest, role: Role) -> None:
        """Raises NotDoneError if the cluster refuses such a pod; who may make none can't ask."""
        try:
            self.cluster.create(objects.pod_of(self.parts, pod, role), dry_run=True)
        except NotDoneError as error:
            if error.by_rights:
                return
            raise NotDoneError(error.status, f"the cluster refuses the {role}'s pod: {_reason(error)}") from error

    def _await_account(self) -> None:
        """Until the cluster would take the master's pod with the account that was made for it."""
        deadline = time.monotonic() + TOKEN_SECONDS
        while True:
            try:
                return self._try_pod(self.parts.master, Role.MASTER)
            except NotDoneError as error:
                if "service account" not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    @contextmanager
    def _undone_on_failure(self) -> Iterator[list[Manifest]]:
        begun: list[Manifest] = []
        try:
            yield begun
        except BaseException:
            for manifest in reversed(begun):
                try:
                    self.cluster.delete(manifest["kind"], manifest["metadata"]["name"])
                except ElasticDLError as error:
                    name = f"{manifest['kind']} {manifest['metadata']['name']}"
                    self.say(f"warning: {name} could not be deleted again: {error}")
            raise


def _reason(error: NotDoneError) -> str:
    """Without the pod's made-up name."""
    _, forbidden, reason = str(error).partition(" is forbidden: ")
    return reason if forbidden else str(error)
