"""Submitting a job and following it: what ``train`` and ``run`` do when there is an image.

The job does not depend on who follows it: a signal ends the following, not the job.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

from elasticdl.cli.cluster.master_watch import LOOK_SECONDS, MasterWatch
from elasticdl.cli.cluster.namespace_job import NamespaceJob
from elasticdl.cli.cluster.pod_prints import PodPrints
from elasticdl.cli.cluster.submission import Submission, make_parts
from elasticdl.cli.course import Follower, Watch, follow
from elasticdl.cli.follow import Following
from elasticdl.cli.job_names import made_up_name
from elasticdl.cli.outlets import tell
from elasticdl.cli.screens import Screen
from elasticdl.cli.signals import SignalLog, caught, interrupt
from elasticdl.common.environment import refuse_variables
from elasticdl.common.errors import UserError
from elasticdl.job.option_values import ranks_of
from elasticdl.job.quantities import parse_envs, parse_secret_envs
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import Client, connect, namespace_of
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.manifests import job_objects
from elasticdl.kube.manifests.job_objects import ManifestInputs
from elasticdl.kube.manifests.names import master_name
from elasticdl.kube.manifests.yaml_text import as_yaml


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
    handle = NamespaceJob(client, parts.spec.job_name, place)
    tell(f"job {handle.name} submitted to {handle.whereabouts}; see `elasticdl status {handle.name}{handle.flags}`")
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
        UserError: its image can't be had; the job was deleted again.
        JobFailedError: it failed, was stopped or is lost.
        Interrupted: by a signal; the job goes on.
    """
    # Of a module's worker the log is its own, from which what the module prints can't be told here.
    ranks = ranks_of(spec.log_ranks) if spec.command else ()

    def watch(screen: Screen, following: Following) -> Watch:
        masters = MasterWatch(handle, screen, spec.image_timeout, look_at=time.monotonic() + LOOK_SECONDS)
        return lambda heard: masters.hear(heard, following.failure, time.monotonic())

    follower = Follower(
        prints=lambda screen: PodPrints(handle.client, handle.name, ranks, screen),
        watch=watch,
        farewell=f"job {handle.name} goes on: `elasticdl stop {handle.name}{handle.flags}` stops it",
    )
    return follow(handle, spec, follower)
