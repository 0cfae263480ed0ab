"""Submitting a job and following it: what ``train`` and ``run`` do when there is an image."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import yaml

from elasticdl.cli.kubernetes.follow import follow
from elasticdl.cli.kubernetes.job import ClusterJob
from elasticdl.cli.kubernetes.submit import Submission, make_parts
from elasticdl.cli.names import made_up_name
from elasticdl.cli.signals import Interrupted, SignalLog, caught, interrupt
from elasticdl.cli.submission import SubmissionOptions
from elasticdl.common.errors import UserError
from elasticdl.common.horovod_variables import refuse_variables
from elasticdl.common.quantities import parse_envs, parse_secret_envs
from elasticdl.common.spec import JobSpec
from elasticdl.kubernetes.client import Client, connect, namespace_of
from elasticdl.kubernetes.kubeconfig import Place
from elasticdl.kubernetes.manifests import job_objects as objects
from elasticdl.kubernetes.manifests.job_objects import Parts
from elasticdl.kubernetes.manifests.names import master_name

NAME_ATTEMPTS = 20


def run_job(spec: JobSpec, options: SubmissionOptions) -> int:
    """Returns the exit code.

    Raises:
        UserError: something is wrong with the job; nothing was started, and nothing stays.
        JobFailedError: the job failed.
        UnreachableError: the cluster does not answer.
        Interrupted: a signal came; once the job is submitted, it goes on.
    """
    refuse_variables(parse_envs(spec.envs))
    refuse_variables({each.name: "" for each in parse_secret_envs(spec.env_from_secret)})
    place = Place(spec.namespace, spec.kube_context)
    if options.yaml and not options.dry_run:  # no cluster is asked
        return _write(make_parts(_named(spec, None), namespace_of(place), datetime.now(UTC)), options.yaml)
    with caught(interrupt):
        submission = _checked(spec, connect(place))
    parts, cluster = submission.parts, submission.cluster
    if options.yaml:
        return _write(parts, options.yaml)
    if options.dry_run:
        print(_dumped(parts), end="")
        return 0
    signals = SignalLog()
    with caught(_patient(signals)):
        submission.make(lambda: _heed(signals))
    job = ClusterJob(cluster, parts.spec.job_name, place)
    print(f"job {job.name} submitted to {job.whereabouts}; see `elasticdl status {job.name}{place.flags}`", flush=True)
    _heed(signals)
    return 0 if options.detach else follow(job, parts.spec)


def _checked(spec: JobSpec, cluster: Client) -> Submission:
    parts = make_parts(_named(spec, cluster), cluster.namespace, datetime.now(UTC))
    submission = Submission(cluster, parts, lambda line: print(line, file=sys.stderr, flush=True)).within_rights()
    submission.check()
    return submission


def _patient(signals: SignalLog) -> Callable[[int], None]:
    """Take note, so that no request is broken off of which nobody would know what it did; the second time, do."""

    def handle(number: int) -> None:
        impatient = signals.first is not None
        signals.add(number)
        if impatient:
            raise Interrupted(number)

    return handle


def _heed(signals: SignalLog) -> None:
    if signals.first is not None:
        raise Interrupted(signals.first)


def _named(spec: JobSpec, cluster: Client | None) -> JobSpec:
    """The same job with a name that is not taken."""
    if spec.job_name:
        return spec
    rng = random.SystemRandom()
    for name in (made_up_name(rng) for _ in range(NAME_ATTEMPTS)):
        if cluster is None or cluster.find("Job", master_name(name)) is None:
            return spec.model_copy(update={"job_name": name})
    return spec.model_copy(update={"job_name": f"job-{rng.randrange(10**9)}"})


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
    text: str = yaml.safe_dump_all([*objects.companions(parts), objects.make_job(parts)], sort_keys=False)
    return text
