"""A job on a cluster: in a namespace, which has its objects. Which jobs there are, and what is left of one."""

from __future__ import annotations

import base64
import contextlib
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from elasticdl.cli.job_handle import AbsentError, JobHandle, Lines, choose
from elasticdl.cli.pod_logs import follow_logs, read_logs
from elasticdl.common.credentials import Endpoint, Role, TlsFiles, TlsFolder
from elasticdl.common.errors import ElasticDLError, RefusedError, UnreachableError, UserError
from elasticdl.job.journal import parse_entry
from elasticdl.kube import names
from elasticdl.kube.client import ABSENT, Client, NotDoneError, Object, connect, end_group
from elasticdl.kube.job_pods import find_master, forwarded
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.manifests import SPEC_FILE, is_over, is_running
from elasticdl.master.shell.state_config_map import State, unpack_state
from elasticdl.places.judge import MASTER_STARTS, Waiting, why_no_master
from elasticdl.places.worker_pods import last_refusal, last_warning

ANY_JOB = f"{names.APPLICATION_LABEL}={names.APPLICATION},{names.JOB_LABEL}"


class NoMasterError(AbsentError):
    def __init__(self, why: Waiting) -> None:
        super().__init__(why.reason)
        self.why = why


@dataclass(frozen=True, slots=True)
class NamespaceJob(JobHandle):
    """Of a job on a cluster."""

    client: Client
    name: str
    place: ClusterTarget = field(default_factory=ClusterTarget)
    look_seconds: ClassVar = 5.0

    @property
    def namespace(self) -> str:
        return self.client.namespace

    @property
    def whereabouts(self) -> str:
        return f"namespace {self.client.namespace} of the cluster at {self.client.server}"

    @property
    def flags(self) -> str:
        return self.place.flags

    def spec_text(self) -> str:
        return str(self.client.read("ConfigMap", names.spec_name(self.name))["data"][SPEC_FILE])

    def status_text(self) -> str:
        return self.state().status

    def state(self) -> State:
        found = self.client.find("ConfigMap", names.state_name(self.name))
        try:
            return unpack_state(found) if found else State()
        except ValueError as error:
            raise UserError(f"job {self.name}: {error}") from None

    def over(self) -> str:
        if self.end():
            return "it has ended"
        job = self.client.find("Job", names.master_name(self.name))
        if job is None:
            return "it was deleted"
        how = _ended(job)
        return f"its Job is {how.lower()}, and its master has not said how it ended" if how else ""

    def why_no_master(self, pod: Object | None) -> Waiting:
        """``pod``: of a master that does not run; None if there is none. What only events say is asked for."""
        waiting = why_no_master(pod)
        with contextlib.suppress(NotDoneError):  # who may not look at events is not told
            if pod is None or is_over(pod):  # the next one may be refused
                refusal = names.without_name(last_refusal(self.client, names.master_name(self.name)))
                return Waiting(f"the cluster does not take its master's pod: {refusal}") if refusal else waiting
            if waiting.reason == MASTER_STARTS:
                warning = last_warning(self.client, pod["metadata"]["name"], pod["metadata"]["uid"])
                return why_no_master(pod, warning)
        return waiting

    def last_known(self) -> tuple[int, float]:
        kept = self.kept_status()
        return kept.step, kept.elapsed

    @contextlib.contextmanager
    def reach(self) -> Iterator[Endpoint]:
        pod = find_master(self.client, self.name)
        if pod is None or not is_running(pod):
            raise NoMasterError(self.why_no_master(pod))
        try:
            with self._endpoint(pod) as endpoint:
                yield endpoint
        except RefusedError:
            raise
        except UnreachableError:
            if not self.client.may("get", "pods/portforward"):
                right = f"it takes the right to get pods/portforward in namespace {self.namespace}"
                raise UserError(f"you may not reach the master: {right}") from None
            raise

    @contextlib.contextmanager
    def _endpoint(self, pod: Object) -> Iterator[Endpoint]:
        """The owner's certificate is here until the end. ``pod``: of the master at the moment."""
        secret = self.client.read("Secret", names.tls_name(self.name, Role.OWNER))
        files = {name: base64.b64decode(content) for name, content in secret["data"].items()}
        with (
            tempfile.TemporaryDirectory(prefix="elasticdl-") as folder,
            forwarded(self.client, self.name, pod) as address,
        ):
            TlsFiles.from_mapping(files).write(Path(folder))
            title = f"the master of job {self.name} in namespace {self.client.namespace}"
            yield Endpoint(address, TlsFolder(Path(folder)), title)

    def entries(self, since: int = 0) -> list[str]:
        """The master's, if there is one that answers: less often some of it is kept."""
        try:
            with self.reached() as master:
                return list(master.events(since, follow=False))
        except ElasticDLError:
            return self.state().journal.splitlines()

    def logs(self, worker: int | None, *, follow: bool) -> Lines:
        pod = "" if worker is None else self._pod_of(worker)
        if follow:
            return follow_logs(self.client, self.name, worker, self.over, pod)
        return read_logs(self.client, self.name, worker, pod)

    def where_logs(self) -> str:
        there = self.client.find("Job", names.master_name(self.name)) is not None
        return f"`elasticdl logs {self.name}{self.flags}`" if there else ""

    def _pod_of(self, worker: int) -> str:
        """Its name; empty if what is kept of the job does not tell, as in its first seconds."""
        with contextlib.suppress(ElasticDLError):
            for entry in filter(None, map(parse_entry, self.entries())):
                if (entry["event"], entry.get("worker")) == ("worker_started", worker):
                    return str(entry.get("place", ""))
        return ""


def find(name: str | None, place: ClusterTarget) -> JobHandle:
    """
    Raises:
        UserError: there is no such job, or which one is meant is not clear.
    """
    client = connect(place)
    if name is None or not client.find("Job", names.master_name(name)):
        jobs = _jobs(client)
        running = [_name_of(job) for job in jobs if not _ended(job)]
        name = choose(name, [_name_of(job) for job in jobs], running, f" in namespace {client.namespace}")
    return NamespaceJob(client, name, place)


def list_jobs(place: ClusterTarget) -> list[JobHandle]:
    """The newest first."""
    client = connect(place)
    return [NamespaceJob(client, _name_of(job), place) for job in _jobs(client)]


def _jobs(client: Client) -> list[Object]:
    return sorted(
        client.list("Job", label_selector=ANY_JOB),
        key=lambda job: str(job["metadata"]["creationTimestamp"]),
        reverse=True,
    )


def _ended(job: Object) -> str:
    """How a Job has ended: "Complete", "Failed", or empty if it has not."""
    held = [str(each["type"]) for each in job.get("status", {}).get("conditions") or () if each["status"] == "True"]
    return next((each for each in held if each in ("Complete", "Failed")), "")


def _name_of(job: Object) -> str:
    return str(job["metadata"]["labels"][names.JOB_LABEL])


# ---- removing one, with everything that belongs to it ----

POLL = 0.5
DELETION_TIMEOUT = 120.0  # beyond the longest grace period of a pod that is likely
# What the master works with goes after it; until then it may still leave in good order.
_KINDS = (
    "Job", "Pod", "Service", "NetworkPolicy", "RoleBinding", "Role", "ServiceAccount", "Secret", "ConfigMap", "PodGroup",
)  # fmt: skip
# Whoever may not list these can't have made them, as the job's master has an account that was there, or the cluster does not know them.
_NOT_IN_EACH_JOB = ("RoleBinding", "Role", "ServiceAccount", "PodGroup")


def delete(name: str, place: ClusterTarget | None) -> str:
    """Returns when all is gone.

    Raises:
        UserError: there is no such job, or the cluster does not let it be deleted.
        UnreachableError: pods are still there after a long time.
    """
    client = connect(place or ClusterTarget())
    meant: set[str] = set()
    for _, listed in _parts_of(client, name):
        for each in listed:
            meant |= {each["metadata"]["uid"], *names.owner_uids(each)}
    if not meant:
        raise UserError(f"there is nothing of a job {name} in namespace {client.namespace}")
    wait_until_gone(client, name, meant)
    return f"job {name} deleted"


def wait_until_gone(client: Client, name: str, meant: Collection[str]) -> None:
    """``meant``: the uids of its objects and of their owners. What comes into being meanwhile is deleted as well, unless it belongs to
    another Job, which somebody has submitted since."""
    deadline = time.monotonic() + DELETION_TIMEOUT
    while left := _delete_once(client, name, meant):
        if time.monotonic() > deadline:
            raise UnreachableError(
                f"{', '.join(left)} of job {name} are still there {DELETION_TIMEOUT:.0f} s after they were deleted"
            )
        time.sleep(POLL)


def _delete_once(client: Client, name: str, meant: Collection[str]) -> list[str]:
    """What there was."""
    found = []
    for kind, listed in _parts_of(client, name):
        mine = [each for each in listed if _is_meant(kind, each, meant)]
        if kind == "Pod":
            end_group(client, mine)
        for metadata in (each["metadata"] for each in mine):
            found.append(f"{kind} {metadata['name']}")
            if not metadata.get("deletionTimestamp"):
                client.delete(kind, metadata["name"])
    return found


def _is_meant(kind: str, made: Object, meant: Collection[str]) -> bool:
    owners = {made["metadata"]["uid"]} if kind == "Job" else names.owner_uids(made)
    return not owners or bool(owners.intersection(meant))


def _parts_of(client: Client, name: str) -> Iterator[tuple[str, list[Object]]]:
    for kind in _KINDS:
        try:
            yield kind, client.list(kind, label_selector=f"{ANY_JOB}={name}")
        except NotDoneError as error:
            if kind not in _NOT_IN_EACH_JOB or not (error.by_rights or error.status == ABSENT):
                raise
