"""A job of a cluster, as the commands see any job: from its master while that runs, else from what it has left."""

from __future__ import annotations

import base64
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import json_format

from elasticdl.cli.cluster.job_streams import JournalReader, LogReaders, followed, read_logs
from elasticdl.cli.cluster.master_pod import finished, trouble_of
from elasticdl.cli.job_handle import not_ended
from elasticdl.cli.line_streams import FixedLines, LineStream
from elasticdl.cli.master_client import MasterClient
from elasticdl.cli.master_client import connect as connect_master
from elasticdl.cli.parsing import did_you_mean
from elasticdl.cli.wording import is_over
from elasticdl.common.credentials import Endpoint, TlsFiles, TlsFolder
from elasticdl.common.errors import ElasticDLError, RefusedError, UnreachableError, UserError
from elasticdl.common.spec import JobSpec
from elasticdl.kubernetes import kubeconfig
from elasticdl.kubernetes.client import Client, Object, connect
from elasticdl.kubernetes.job_pods import find_master, find_pods, is_running
from elasticdl.kubernetes.kubeconfig import Place
from elasticdl.kubernetes.manifests.names import (
    APPLICATION,
    APPLICATION_LABEL,
    JOB_LABEL,
    Role,
    master_name,
    spec_name,
    state_name,
    tls_name,
)
from elasticdl.kubernetes.manifests.packed_state import State, unpack_state
from elasticdl.kubernetes.manifests.pod import SPEC_FILE
from elasticdl.kubernetes.port_forward import forwarded
from elasticdl.proto import elasticdl_pb2 as pb

POLL = 0.5


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
        return JobSpec.from_json(self.client.read("ConfigMap", spec_name(self.name))["data"][SPEC_FILE])

    def status(self) -> pb.JobStatus:
        kept = self.kept_status()
        if kept is not None and is_over(kept):
            return kept
        job = self.client.find("Job", master_name(self.name))
        if job is None:
            return self._described("lost", "it was deleted")
        if how := finished(job):
            # Between the two looks it may have written how it ended.
            kept = self.kept_status()
            if kept is not None and is_over(kept):
                return kept
            return self._described("lost", f"its Job is {how.lower()}, and its master has not said how it ended")
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
            return self._described("starting", reason)
        kept.reason = f"{last}; this was its last word"
        return kept

    def kept_status(self) -> pb.JobStatus | None:
        """The last that was written down."""
        text = self.state().status
        return json_format.Parse(text, pb.JobStatus(), ignore_unknown_fields=True) if text else None

    def state(self) -> State:
        found = self.client.find("ConfigMap", state_name(self.name))
        try:
            return unpack_state(found) if found else State()
        except ValueError as error:
            raise UserError(f"job {self.name}: {error}") from None

    def _described(self, phase: str, reason: str) -> pb.JobStatus:
        return pb.JobStatus(job_name=self.name, phase=phase, reason=reason, time_left=-1)

    @contextmanager
    def master(self) -> Iterator[MasterClient]:
        pod = find_master(self.client, self.name)
        if not is_running(pod):
            kept = self.kept_status()
            how = f"it has {kept.phase}" if kept and is_over(kept) else trouble_of(pod).reason
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
        secret = self.client.read("Secret", tls_name(self.name, Role.OWNER))
        files = {name: base64.b64decode(content) for name, content in secret["data"].items()}
        with (
            tempfile.TemporaryDirectory(prefix="elasticdl-") as folder,
            forwarded(self.client, self.name) as address,
        ):
            TlsFiles.from_mapping(files).write(Path(folder))
            title = f"the master of job {self.name} in namespace {self.client.namespace}"
            yield Endpoint(address, TlsFolder(Path(folder)), title)

    @contextmanager
    def journal(self, *, follow: bool) -> Iterator[LineStream]:
        if follow:
            with followed(JournalReader(self)) as journal:
                yield journal
        else:
            yield FixedLines(self.journal_now())

    def journal_now(self) -> list[str]:
        """The master's own, if there is one that answers."""
        try:
            with self.master() as master:
                return list(master.events(follow=False))
        except ElasticDLError:
            return self.state().journal.splitlines()

    def has_ended(self) -> bool:
        """Whether nothing more will come of it."""
        kept = self.kept_status()
        if kept is not None and is_over(kept):
            return True
        job = self.client.find("Job", master_name(self.name))
        return job is None or bool(finished(job))

    @contextmanager
    def logs(self, worker: int | None, *, follow: bool) -> Iterator[LineStream]:
        if follow:
            find_pods(self.client, self.name, worker)  # who may not is told now
            with followed(LogReaders(self, worker)) as logs:
                yield logs
        else:
            yield FixedLines(read_logs(self.client, self.name, worker))

    def wait_until_over(self, timeout: float) -> pb.JobStatus | None:
        deadline = time.monotonic() + timeout
        while not self.has_ended():
            if time.monotonic() > deadline:
                raise UnreachableError(not_ended(self.name, timeout, self.place.flags))
            time.sleep(POLL)
        return self.kept_status()


def find(name: str | None, namespace: str, context: str) -> ClusterJob:
    """
    Raises:
        UserError: there is no such job, or which one is meant is not clear.
    """
    place = Place(namespace, context)
    client = connect(place)
    if name is not None:
        if client.find("Job", master_name(name)):
            return ClusterJob(client, name, place)
        client.require_namespace()
        near = did_you_mean(name, [_name_of(job) for job in _jobs(client)])
        raise UserError(f"there is no job {name} in namespace {client.namespace}{f': {near}' if near else ''}")
    running = [_name_of(job) for job in _jobs(client) if not finished(job)]
    if len(running) == 1:
        return ClusterJob(client, running[0], place)
    if running:
        raise UserError(f"{len(running)} jobs are running, so name one: {', '.join(running)}")
    client.require_namespace()
    raise UserError(f"no job is running in namespace {client.namespace}; name one to look at an old one")


def is_configured() -> bool:
    return kubeconfig.is_configured(Place())


def find_current(name: str) -> ClusterJob | None:
    """The job of that name of the kubeconfig's current context, if there is one."""
    client = connect(Place())
    return ClusterJob(client, name) if client.find("Job", master_name(name)) else None


def list_jobs(namespace: str, context: str) -> list[ClusterJob]:
    """The newest first."""
    place = Place(namespace, context)
    client = connect(place)
    jobs = _jobs(client)
    if not jobs:
        client.require_namespace()
    return [ClusterJob(client, _name_of(job), place) for job in jobs]


def _jobs(client: Client) -> list[Object]:
    found = client.list("Job", label_selector=f"{APPLICATION_LABEL}={APPLICATION},{JOB_LABEL}")
    return sorted(found, key=lambda job: str(job["metadata"]["creationTimestamp"]), reverse=True)


def _name_of(job: Object) -> str:
    return str(job["metadata"]["labels"][JOB_LABEL])
