"""`python -m elasticdl.master.shell.cluster_master --job_folder DIR`: the master of a job on a Kubernetes cluster, in a pod.

It may be one of several, one after another: the Job starts the next when this one ends without the job having ended.

Exit codes: 0 succeeded, or stopped on request: the Job is complete. 1 failed, 2 the user's mistake: after these the Job
starts no other, as its backoff limit is taken away first. 2 also if the master's account lacks a right: then others follow, as
after a crash. 143: told to leave (SIGTERM), or replaced; the workers go on, and the next master takes them over. Anything else:
it crashed. Another may do better, unless several have crashed in a row (`judge.crash_loop`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from elasticdl.common import credentials as variables
from elasticdl.common.channel import identify
from elasticdl.common.credentials import Role, TlsFolder
from elasticdl.common.errors import JobFailedError, UnreachableError, UserError
from elasticdl.job.jobdir import JobDir
from elasticdl.job.quantities import parse_priority
from elasticdl.job.spec import JobSpec
from elasticdl.kube.client import CONFLICT, FORBIDDEN, Client, NotDoneError, connect
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.manifests import TEMPLATE_FILE
from elasticdl.kube.names import MASTER_PORT, METRICS_PORT, master_name, selector, state_name
from elasticdl.master.core.values import Phase
from elasticdl.master.shell.agents import Agents
from elasticdl.master.shell.calls import Server, TlsAccess
from elasticdl.master.shell.metrics import MetricsServer, Prometheus
from elasticdl.master.shell.serve import EXIT_CODES, EXIT_USER_ERROR, Master, RelievedError, handling, log_as, read_spec
from elasticdl.master.shell.state_config_map import ClusterState, request
from elasticdl.places.base import Limits, PlaceReport, Report
from elasticdl.places.judge import TRACKING, crash_loop, last_crashes
from elasticdl.places.launcher import PlaceLauncher, Seconds
from elasticdl.places.pod_places import KILL_GRACE, PodPlaces, PodTimeouts
from elasticdl.places.worker_pods import WorkerPodApi, WorkerPods, owner_references
from elasticdl.proto import elasticdl_pb2 as pb

_log = logging.getLogger(__name__)

EXIT_LEFT = 128 + signal.SIGTERM  # of a master that was told to leave
_LOOPBACKS = ("127.0.0.1", "[::1]")
_FINAL = [phase for phase in Phase if phase.final]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m elasticdl.master.shell.cluster_master", description=__doc__)
    parser.add_argument("--job_folder", required=True, type=Path, help="folder with job.json and worker.json")
    folder = parser.parse_args(argv).job_folder
    try:
        with tempfile.TemporaryDirectory(prefix="elasticdl-") as scratch:
            return asyncio.run(run(os.environ, folder, Path(scratch)))
    except (UserError, JobFailedError) as error:
        print(f"elasticdl: {error}", file=sys.stderr)
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_CODES[Phase.FAILED]
    except (RelievedError, UnreachableError) as error:
        _log.warning("%s", error)
        return EXIT_LEFT


async def run(environ: Mapping[str, str], folder: Path, scratch: Path) -> int:
    """Returns the exit code. The job's name is taken from the certificate, so it is known if the specification is damaged.

    Raises:
        UserError: the job has failed for it.
        JobFailedError: masters before this one have crashed again and again.
        RelievedError: the master was told to leave.
        UnreachableError: the cluster does not answer.
    """
    own_task: asyncio.Task[Any] | None = asyncio.current_task()
    leave: list[Callable[[str], object]] = [own_task.cancel] if own_task else []  # the last is who is to leave

    def told(signal_name: str) -> None:
        leave[-1](f"it got {signal_name}")

    signals = (signal.SIGTERM, signal.SIGINT)
    with handling({each: partial(told, each.name) for each in signals}):
        try:
            return await _serve(environ, folder, scratch, leave)
        except asyncio.CancelledError as error:
            raise RelievedError(str(error)) from None


async def _serve(environ: Mapping[str, str], folder: Path, scratch: Path, leave: list[Callable[[str], object]]) -> int:
    """``leave``: its last is called if the process is told to leave."""
    names = (variables.NAMESPACE, variables.POD_UID, variables.HOST, variables.TLS)
    if missing := [each for each in names if each not in environ]:
        raise UserError(f"{missing[0]} is not set: a cluster's master is started by `elasticdl train`")
    namespace, uid, host, tls = *(environ[each] for each in names[:3]), TlsFolder(Path(environ[variables.TLS]))
    name = identify(tls).job
    job_dir = JobDir(scratch / name)
    job_dir.path.mkdir()
    client = connect(ClusterTarget(namespace), own_account=True)
    job = await request(partial(client.read, "Job", master_name(name)), "read the job")
    state_map = await request(partial(client.read, "ConfigMap", state_name(name)), "read the job's state")
    state = ClusterState(client, name, uid, job_dir.journal)
    try:
        masters = partial(client.list, "Pod", label_selector=selector(name, Role.MASTER))
        crashes = last_crashes(await request(masters, "list the masters before this one"), job["metadata"]["uid"])
        if why := crash_loop(crashes):
            raise JobFailedError(why)
        await request(partial(require_rights, client), "ask what its account may do")
        spec, template = read_spec(JobDir(folder)), read_template(folder / TEMPLATE_FILE)
        log_as(name, spec)
        pods = partial(
            WorkerPods,
            name,
            namespace,
            owner_references(job, state_map),
            template,
            priority=parse_priority(spec.worker_pod_priority),
        )
        master = make_master(spec, job_dir, client, state, pods, (host, tls))
        leave.append(master.leave)
        async with contextlib.nullcontext() if crashes else uncounted(client, name, uid):
            end = await master.run()
        status = job_dir.status.read_text()
    except NotDoneError:  # a right is missing, which the next master may have
        raise
    except (UserError, JobFailedError) as error:
        leave.append(lambda why: None)  # the job's end is to be written down
        failed = pb.JobStatus(job_name=name, phase=str(Phase.FAILED), reason=str(error), time_left=-1)
        await state.claim()
        await end_workers(WorkerPodApi(client, name))
        await state.finish(json_format.MessageToJson(failed), Phase.FAILED)
        raise
    await state.finish(status, end.phase)
    return exit_code(end.phase)


def read_template(path: Path) -> Any:
    """
    Raises:
        UserError: it is not there, or damaged.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"can't read the template of the workers' pods {path}: {error}") from None


def require_rights(client: Client) -> None:
    """Those without which the workers are not looked after, and nothing would say so.

    Raises:
        NotDoneError: the master's account has not got them.
    """
    if missing := [verb for verb in ("create", "watch", "delete", "deletecollection") if not client.may(verb, "pods")]:
        what = f"its account cannot {', '.join(missing)} the resource pods in namespace {client.namespace}"
        raise NotDoneError(FORBIDDEN, f"{what}: docs/kubernetes.md says what a master must be allowed")


def make_master(
    spec: JobSpec,
    job_dir: JobDir,
    client: Client,
    state: ClusterState,
    pods: Callable[[Limits], WorkerPods],
    listens: tuple[str, TlsFolder],
) -> Master:
    """``listens``: at which address of its pod, and by which keys."""
    agents, timeouts = Agents(), PodTimeouts(image=spec.image_timeout)
    address, tls = listens

    def make_launcher(report: Report, limits: Limits) -> PlaceLauncher:
        api = WorkerPodApi(client, spec.job_name)

        def make_places(report: PlaceReport) -> PodPlaces:
            # There were no more pods than workers, so no earlier one has the number, of which nothing may be left.
            return PodPlaces(api, pods(limits), report, timeouts, random.Random(), state.next_worker)

        return PlaceLauncher(make_places, agents.reporting_to, report, seconds=Seconds(start=spec.start_timeout))

    server = Server(f"[{address}]" if ":" in address else address, TlsAccess.load(tls))
    port = server.bind(MASTER_PORT)
    # A port-forward comes in there; in a pod of its own network nobody else can have the port.
    for loopback in _LOOPBACKS:
        server.listen(loopback, port)
    master = Master(spec, job_dir, server, state, make_launcher, agents=agents)
    # Seen between two masters. The end of a job is shown only after everything else is done.
    state.status = lambda: (
        "" if (now := master.status()).phase in _FINAL else json_format.MessageToJson(now, indent=None)
    )
    metrics = Prometheus(master.status, master.facts, asyncio.get_running_loop())
    try:
        master.observe(MetricsServer((address, METRICS_PORT), tls, metrics))
    except OSError as error:  # the job goes on without metrics
        _log.error("can't listen at port %d, so there are no metrics: %s", METRICS_PORT, error.strerror)
    return master


async def set_counted(client: Client, job: str, uid: str, *, counted: bool) -> None:
    """Whether the Job counts how this master's pod ends: see `elasticdl.places.judge`.

    Raises:
        UnreachableError: the cluster does not answer.
    """

    def attempt() -> None:
        masters = client.list("Pod", label_selector=selector(job, Role.MASTER))
        for own in (pod["metadata"] for pod in masters if pod["metadata"]["uid"] == uid):
            others = [each for each in own.get("finalizers") or () if each != TRACKING]
            change = {
                "finalizers": [*others, TRACKING] if counted else others,
                "resourceVersion": own["resourceVersion"],
            }
            try:
                client.patch("Pod", own["name"], {"metadata": change})
            except NotDoneError as error:
                if error.status == CONFLICT:  # it has changed meanwhile: once more
                    raise
                # A pod that is being deleted gets no finalizer: the next master finds that the job is over.
                _log.warning("can't tell the Job whether it counts this master: %s", error)

    await request(attempt, "tell the Job whether it counts this master")


@contextlib.asynccontextmanager
async def uncounted(client: Client, job: str, uid: str) -> AsyncIterator[None]:
    """A master that is lost in the block is not counted."""
    with contextlib.suppress(UnreachableError):
        await set_counted(client, job, uid, counted=False)
    try:
        yield
    except (RelievedError, UnreachableError):
        raise
    except Exception:  # nobody counts a master that is cancelled
        await set_counted(client, job, uid, counted=True)
        raise
    await set_counted(client, job, uid, counted=True)


async def end_workers(api: WorkerPodApi) -> None:
    """
    Raises:
        UnreachableError: the cluster does not answer.
    """
    with contextlib.suppress(UnreachableError):  # the pods are to go in any case
        await request(api.end_group, "end the gang")
    await request(partial(api.delete_all, KILL_GRACE), "end the workers")


def exit_code(phase: Phase) -> int:
    """Of the master's container, by which its Job is complete or failed. Whoever had it stopped has got what was asked for."""
    return 0 if phase is Phase.STOPPED else EXIT_CODES[phase]


if __name__ == "__main__":
    sys.exit(main())
