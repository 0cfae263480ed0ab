"""Submitting a job and following it: what ``train`` and ``run`` do when there is an image."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from yaml import safe_dump_all

from elasticdl.cli.cluster.cluster_follow import follow
from elasticdl.cli.cluster.cluster_job import ClusterJob
from elasticdl.cli.cluster.submission import Submission, make_parts
from elasticdl.cli.job_names import made_up_name
from elasticdl.cli.signals import Interrupted, SignalLog, caught, interrupt
from elasticdl.common.errors import UserError
from elasticdl.common.horovod_variables import refuse_variables
from elasticdl.common.quantities import parse_envs, parse_secret_envs
from elasticdl.common.spec import JobSpec
from elasticdl.kubernetes.client import Client, connect, namespace_of
from elasticdl.kubernetes.kubeconfig import Place
from elasticdl.kubernetes.manifests import job_objects
from elasticdl.kubernetes.manifests.job_objects import Parts
from elasticdl.kubernetes.manifests.names import master_name


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
    place = Place(spec.namespace, spec.kube_context)
    if yaml and not dry_run:  # no cluster is asked
        return _write(make_parts(_named(spec, None), namespace_of(place), datetime.now(UTC)), yaml)
    with caught(interrupt):
        submission = _checked(spec, connect(place))
    parts, client = submission.parts, submission.client
    if yaml:
        return _write(parts, yaml)
    if dry_run:
        print(_dumped(parts), end="")
        return 0
    signals = SignalLog()
    with caught(_patient(signals)):
        submission.make(lambda: _raise_if_signalled(signals))
    job = ClusterJob(client, parts.spec.job_name, place)
    print(f"job {job.name} submitted to {job.whereabouts}; see `elasticdl status {job.name}{place.flags}`", flush=True)
    _raise_if_signalled(signals)
    return 0 if detach else follow(job, parts.spec)


def _checked(spec: JobSpec, client: Client) -> Submission:
    parts = make_parts(_named(spec, client), client.namespace, datetime.now(UTC))
    submission = Submission(client, parts, lambda line: print(line, file=sys.stderr, flush=True)).within_rights()
    submission.check()
    return submission


def _patient(signals: SignalLog) -> Callable[[int], None]:
    """The first signal lets the present request finish, as nobody would know what it did; the second breaks it off."""

    def handle(number: int) -> None:
        impatient = signals.first is not None
        signals.add(number)
        if impatient:
            raise Interrupted(number)

    return handle


def _raise_if_signalled(signals: SignalLog) -> None:
    if signals.first is not None:
        raise Interrupted(signals.first)


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
    return 0


def _dumped(parts: Parts) -> str:
    text: str = safe_dump_all([*job_objects.companions(parts), job_objects.make_job(parts)], sort_keys=False)
    return text
