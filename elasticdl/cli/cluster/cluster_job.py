"""A job of a cluster, as the commands see any job: from its master while that runs, else from what it has left."""

from __future__ import annotations

import base64
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import json_format

from elasticdl.cli.cluster.job_streams import Told, follow_logs, read_logs
from elasticdl.cli.cluster.stream_feed import StreamFeed
from elasticdl.cli.job_handle import JournalFeed, Lines, choose, described, wait_for_end
from elasticdl.cli.master_client import MasterClient
from elasticdl.cli.master_client import connect as connect_master
from elasticdl.cli.wording import is_over
from elasticdl.common.credentials import Endpoint, Role, TlsFiles, TlsFolder
from elasticdl.common.errors import ElasticDLError, RefusedError, UnreachableError, UserError
from elasticdl.job.spec import JobSpec
from elasticdl.kube.api_error import ABSENT, NotDoneError
from elasticdl.kube.client import Client, Object, connect
from elasticdl.kube.job_pods import find_master, forwarded, is_running
from elasticdl.kube.kubeconfig import Place
from elasticdl.kube.manifests import names
from elasticdl.kube.manifests.packed_state import State, unpack_state
from elasticdl.kube.manifests.pod import SPEC_FILE
from elasticdl.kube.manifests.pod_status import finished, trouble_of
from elasticdl.proto import elasticdl_pb2 as pb

POLL = 0.5
# What the master works with goes after it; until then it may still leave in good order.
_KINDS = (
    "Job",
    "Pod",
    "Service",
    "NetworkPolicy",
    "RoleBinding",
    "Role",
    "ServiceAccount",
    "Secret",
    "ConfigMap",
    "Lease",
    "PodGroup",
)
# Users who may not list these can't have made them: the job's master has an account that was there, and shares no queue.
_WITH_MORE_RIGHTS = ("RoleBinding", "Role", "ServiceAccount", "Lease", "PodGroup")
_NOT_EVERYWHERE = ("PodGroup",)  # a cluster without Volcano knows no such objects
DELETION_TIMEOUT = 120.0  # beyond the longest grace period of a pod that is likely
_ANY_JOB = f"{names.APPLICATION_LABEL}={names.APPLICATION},{names.JOB_LABEL}"
AGAIN_SECONDS = 1.0  # before a master is asked once more


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """See `elasticdl.cli.job_handle.JobHandle`."""

    client: Client
    name: str
    place: Place = field(default_factory=Place)

    @property
    def namespace(self) -> str:
        return self.client.namespace

    @property
    def whereabouts(self) -> str:
        return f"namespace {self.client.namespace} of the cluster at {self.client.server}"

    def spec(self) -> JobSpec:
        return JobSpec.from_json(self.client.read("ConfigMap", names.spec_name(self.name))["data"][SPEC_FILE])

    def status(self) -> pb.JobStatus:
        kept = self.kept_status()
        if kept is not None and is_over(kept):
            return kept
        job = self.client.find("Job", names.master_name(self.name))
        if job is None:
            return described(self.name, "lost", "it was deleted")
        if how := finished(job):
            # Between the two looks it may have written how it ended.
            lost = f"its Job is {how.lower()}, and its master has not said how it ended"
            return self._end() or described(self.name, "lost", lost)
        pod = find_master(self.client, self.name)
        reason = trouble_of(pod).reason
        last = f"there is no master at the moment: {reason}"
        if is_running(pod):
            try:
                with self.master() as master:
                    return master.status()
            except RefusedError:
                raise
            except UnreachableError:
                reason = last = "its master does not answer at the moment"
        if kept is None:
            return described(self.name, "starting", reason)
        kept.reason = f"{last}; this was its last word"
        return kept

    def kept_status(self) -> pb.JobStatus | None:
        """The last that was written down."""
        text = self.state().status
        return json_format.Parse(text, pb.JobStatus(), ignore_unknown_fields=True) if text else None

    def _end(self) -> pb.JobStatus | None:
        """The status with which it ended, if it has said so."""
        kept = self.kept_status()
        return kept if kept is not None and is_over(kept) else None

    def state(self) -> State:
        found = self.client.find("ConfigMap", names.state_name(self.name))
        older = self.client.find("ConfigMap", names.journal_name(self.name)) if found else None
        try:
            return unpack_state(found, older) if found else State()
        except ValueError as error:
            raise UserError(f"job {self.name}: {error}") from None

    @contextmanager
    def master(self) -> Iterator[MasterClient]:
        pod = find_master(self.client, self.name)
        if not is_running(pod):
            end = self._end()
            how = f"it has {end.phase}" if end else trouble_of(pod).reason
            raise UserError(f"job {self.name} is not running: {how}")
        try:
            with self.endpoint() as endpoint, connect_master(endpoint) as master:
                yield master
        except RefusedError:
            raise
        except UnreachableError:
            if missing := self.missing_right():
                raise UserError(f"you may not reach the master: {missing}") from None
            raise

    def missing_right(self) -> str:
        """Which right it takes to reach its master, if the user has not got it."""
        if self.client.may("get", "pods/portforward"):
            return ""
        return f"it takes the right to get pods/portforward in namespace {self.namespace}"

    @contextmanager
    def endpoint(self) -> Iterator[Endpoint]:
        """The way to its master, whichever that is at the moment; the owner's certificate is here until the end."""
        secret = self.client.read("Secret", names.tls_name(self.name, Role.OWNER))
        files = {name: base64.b64decode(content) for name, content in secret["data"].items()}
        with (
            tempfile.TemporaryDirectory(prefix="elasticdl-") as folder,
            forwarded(self.client, self.name) as address,
        ):
            TlsFiles.from_mapping(files).write(Path(folder))
            title = f"the master of job {self.name} in namespace {self.client.namespace}"
            yield Endpoint(address, TlsFolder(Path(folder)), title)

    def feed(self) -> JournalFeed:
        return StreamFeed(self.master, self.has_ended, lambda: self.state().journal.splitlines())

    def journal(self, *, follow: bool) -> Lines:
        """The master's own, if there is one that answers; each entry is told once, whichever masters tell it."""
        told = Told()
        while True:
            ended = not follow
            with suppress(ElasticDLError):
                with self.master() as master:
                    yield from filter(told.is_new, master.events(follow=follow))
                if not follow:
                    return
            with suppress(ElasticDLError):
                ended = ended or self.has_ended()
            if ended:
                break
            time.sleep(AGAIN_SECONDS)
        yield from filter(told.is_new, self.state().journal.splitlines())

    def has_ended(self) -> bool:
        """Whether nothing more will come of it."""
        if self._end() is not None:
            return True
        job = self.client.find("Job", names.master_name(self.name))
        return job is None or bool(finished(job))

    def logs(self, worker: int | None, *, follow: bool) -> Lines:
        if follow:
            return follow_logs(self.client, self.name, worker, self.has_ended)
        return read_logs(self.client, self.name, worker)

    def wait_until_over(self, timeout: float) -> pb.JobStatus | None:
        wait_for_end(self.name, self.has_ended, timeout, POLL, self.place.flags)
        return self.kept_status()


def find(name: str | None, namespace: str, context: str) -> ClusterJob:
    """
    Raises:
        UserError: there is no such job, or which one is meant is not clear.
    """
    place = Place(namespace, context)
    client = connect(place)
    if name is None or not client.find("Job", names.master_name(name)):
        jobs = _jobs(client)
        if not jobs:
            client.require_namespace()
        running = [_name_of(job) for job in jobs if not finished(job)]
        name = choose(name, [_name_of(job) for job in jobs], running, f" in namespace {client.namespace}")
    return ClusterJob(client, name, place)


def find_current(name: str) -> ClusterJob | None:
    """The job of that name of the kubeconfig's current context, if there is one."""
    client = connect(Place())
    return ClusterJob(client, name) if client.find("Job", names.master_name(name)) else None


def list_jobs(namespace: str, context: str) -> list[ClusterJob]:
    """The newest first."""
    place = Place(namespace, context)
    client = connect(place)
    jobs = _jobs(client)
    if not jobs:
        client.require_namespace()
    return [ClusterJob(client, _name_of(job), place) for job in jobs]


def _jobs(client: Client) -> list[Object]:
    found = client.list("Job", label_selector=_ANY_JOB)
    return sorted(found, key=lambda job: str(job["metadata"]["creationTimestamp"]), reverse=True)


def _name_of(job: Object) -> str:
    return str(job["metadata"]["labels"][names.JOB_LABEL])


def delete(name: str, namespace: str, context: str) -> str:
    """Returns when all is gone.

    Raises:
        UserError: there is no such job, or the cluster does not let it be deleted.
        UnreachableError: pods are still there after a long time.
    """
    client = connect(Place(namespace, context))
    if not _delete_once(client, name):
        client.require_namespace()
        raise UserError(f"there is nothing of a job {name} in namespace {client.namespace}")
    wait_until_gone(client, name)
    return f"job {name} deleted"


def wait_until_gone(client: Client, name: str) -> None:
    """What comes into being meanwhile is deleted as well."""
    deadline = time.monotonic() + DELETION_TIMEOUT
    while left := _delete_once(client, name):
        if time.monotonic() > deadline:
            names = ", ".join(left)
            raise UnreachableError(
                f"{names} of job {name} are still there {DELETION_TIMEOUT:.0f} s after they were deleted"
            )
        time.sleep(POLL)


def _delete_once(client: Client, name: str) -> list[str]:
    """What there was."""
    found = []
    for kind in _KINDS:
        try:
            listed = client.list(kind, label_selector=f"{_ANY_JOB}={name}")
        except NotDoneError as error:
            if (error.by_rights and kind in _WITH_MORE_RIGHTS) or (error.status == ABSENT and kind in _NOT_EVERYWHERE):
                continue
            raise
        for metadata in (each["metadata"] for each in listed):
            found.append(f"{kind} {metadata['name']}")
            if not metadata.get("deletionTimestamp"):
                client.delete(kind, metadata["name"])
    return found
