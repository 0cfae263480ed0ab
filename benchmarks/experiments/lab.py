"""A cluster, a namespace of it, and jobs in it as a user submits them; what was made is removed however it ends.

    with open_lab(options, gpus=6) as lab, GpuSeries(lab.core, lab.namespace, path) as series:
        lab.submit("first", flags)
        series.wait(...)
        journal = lab.journal("first")

Tier 1 is started and ended here. Of a given cluster it takes a namespace of its own, unless one is given, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes import client
from urllib3.exceptions import HTTPError

from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.gang import QUEUE, GangScheduler
from benchmarks.experiments.options import NO_QUEUE, OWN_QUEUE, ClusterKind, Options
from benchmarks.experiments.pods import Pods, gpu_capacity, held_gpus, is_over, owner_of, role_of
from benchmarks.harness import describe_machine, machine_facts
from benchmarks.job import COMMAND
from benchmarks.processes import ROOT, Failed
from elasticdl.common.credentials import Role
from elasticdl.common.errors import UserError
from elasticdl.job.journal import Entry
from elasticdl.job.quantities import GPU
from elasticdl.kube.client import connect
from elasticdl.kube.kubeconfig import ClusterTarget
from elasticdl.kube.names import master_name
from tests.cluster.kit import new_namespace

NODE_GPUS = 3  # of each node of tier 1, if the experiment's are a multiple of it
COMMAND_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Lab:
    options: Options
    core: client.CoreV1Api
    namespace: str
    folder: Path  # on tier 1 the pods see it under the same path
    env: Mapping[str, str]  # with which commands find the cluster
    _jobs: list[str] = field(default_factory=list)

    @property
    def place_flags(self) -> list[str]:
        """By which a command finds the namespace."""
        return ["--namespace", self.namespace]

    def elasticdl(self, command: str, *arguments: str) -> str:
        """Run a command as a user does; what it prints."""
        whole = [*COMMAND, command, *self.place_flags, *arguments]
        shown = f"elasticdl {' '.join([command, *arguments[:1]])}"
        try:
            done = subprocess.run(
                whole, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{shown}: not done within {COMMAND_SECONDS:g} s") from None
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
            raise Failed(f"{shown} ended with {done.returncode}: {said[-1]}")
        return done.stdout

    def submit(self, name: str, flags: Sequence[str]) -> None:
        """`elasticdl train --detach`, with the image and the volume of this cluster."""
        self._jobs.append(name)
        volume = ["--volume", self.options.volume] if self.options.volume else []
        self.elasticdl("train", "--job_name", name, "--image", self.options.image, "--detach", *volume, *flags)

    def journal(self, name: str) -> list[Entry]:
        return [json.loads(line) for line in self.elasticdl("events", name, "--json").splitlines()]

    def logs(self, name: str) -> list[str]:
        return self.elasticdl("logs", name).splitlines()

    def keep_traces(self, names: Sequence[str], artefacts: Artefacts) -> None:
        """Of jobs that did not do as they should; they go with the lab."""
        for name in names:
            try:
                artefacts.text(f"{name}.log", "\n".join(self.logs(name)))
                artefacts.journal(f"events-{name}", self.journal(name))
            except Failed as error:
                print(f"warning: {error}", file=sys.stderr)

    def training_data(self, samples: int) -> str:
        """Where the pods find CIFAR-10: the real one in a given cluster, a stand-in of so many samples on tier 1."""
        if self.options.training_data:
            return self.options.training_data
        from model_zoo.cifar10.generate import generate

        return str(generate(self.folder / "data", "binary", samples, self.options.seed))

    def close(self) -> None:
        """Remove the jobs from a cluster that stays; says what could not be removed."""
        for job in self._jobs:
            with removing(f"job {job}"):
                client.BatchV1Api(self.core.api_client).delete_namespaced_job(
                    master_name(job), self.namespace, propagation_policy="Background"
                )


def job_is_over(pods: Pods, job: str) -> bool:
    """Whether its master has ended, and no worker holds a GPU any more."""
    own = [pod for pod in pods.values() if owner_of(pod) == job]
    masters = [pod for pod in own if role_of(pod) == Role.MASTER]
    return bool(masters) and all(is_over(pod) for pod in masters) and not any(held_gpus(pod) for pod in own)


@contextmanager
def conducted(
    options: Options, gpus: int, results: Sequence[str], real: str, simulated: str
) -> Iterator[tuple[Lab, Artefacts]]:
    """An experiment in a lab of its own; says what of it is real. ``results``: what an earlier one has left."""
    machine = machine_facts()
    facts = {"scale": options.scale, "seed": options.seed, "real": real, "simulated": simulated, "machine": machine}
    artefacts = Artefacts(options.out, facts)
    with artefacts.claimed():
        print(f"{describe_machine(machine)}\nreal: {real}\nsimulated: {simulated}", flush=True)
        with open_lab(options, gpus) as lab:
            artefacts.discard(*results)
            yield lab, artefacts
    print(f"results: {options.out}")


@contextmanager
def open_lab(options: Options, gpus: int) -> Iterator[Lab]:
    """A lab with so many free GPUs."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="elasticdl-lab-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        size = NODE_GPUS if gpus % NODE_GPUS == 0 else gpus
        nodes = {f"n{number}": size for number in range(gpus // size)}
        kubeconfig = stack.enter_context(_tier1(nodes)) if options.cluster is ClusterKind.TIER1 else None
        core = client.CoreV1Api(connect(ClusterTarget(file=str(kubeconfig or ""))).api)
        with refusals("look at the cluster's nodes and pods"):
            require_free_gpus(core, gpus)
        namespace = options.namespace
        with refusals(f"use --namespace {namespace}" if namespace else "make one (or give one with --namespace)"):
            if namespace:
                core.read_namespace(namespace)
            else:
                namespace = stack.enter_context(new_namespace(core.api_client))
        if options.queue == OWN_QUEUE:
            stack.enter_context(GangScheduler(core, namespace))
        own = {"ELASTICDL_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
        env = {**os.environ, **own, **({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})}
        lab = Lab(options, core, namespace, folder, env)
        if kubeconfig is None:
            stack.callback(lab.close)
        yield lab


def queue_flags(options: Options) -> list[str]:
    """For a job that is to be placed as a whole or not at all."""
    named = {OWN_QUEUE: QUEUE, NO_QUEUE: ""}.get(options.queue, options.queue)
    return ["--gang", *(["--queue", named] if named else [])]


def require_free_gpus(core: client.CoreV1Api, wanted: int) -> None:
    total = sum(gpu_capacity(core).values())
    listed: Any = core.list_pod_for_all_namespaces(_preload_content=False)
    pods = json.loads(listed.data)["items"]
    taken = {"{namespace}/{name}".format_map(pod["metadata"]): held for pod in pods if (held := held_gpus(pod))}
    free = total - sum(taken.values())
    if free < wanted:
        others = f"; pods hold the others: {', '.join(sorted(taken)[:5])}" if taken else ""
        there = f"{free} of {total} GPUs ({GPU}) on nodes that take pods are free"
        raise UserError(f"the experiment needs {wanted} GPUs, and {there}{others}")


@contextmanager
def _tier1(nodes: Mapping[str, int]) -> Iterator[Path]:
    """The kubeconfig of a cluster that is started here."""
    # Only here: whoever has a cluster need not have what builds one.
    from tests.cluster.build import find_programs
    from tests.cluster.cluster import Cluster
    from tests.cluster.control_plane import ControlPlaneError
    from tests.cluster.recipes import BuildError, Unavailable

    try:
        cluster = Cluster(find_programs(), nodes)
        cluster.start()
    except (Unavailable, BuildError) as error:
        raise UserError(f"--cluster tier1: {error}") from error
    except ControlPlaneError as error:
        raise Failed(f"the cluster did not come up: {error}") from error
    try:
        yield cluster.kubeconfig
    finally:
        cluster.stop()


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """What a cluster answers, as errors of ours."""
    try:
        yield
    except client.ApiException as error:
        mended_by_the_user = error.status in (401, 403, 404)
        raise (UserError if mended_by_the_user else Failed)(
            f"could not {what}: {error.status} {error.reason}"
        ) from error
    except (OSError, HTTPError) as error:
        raise Failed(f"the cluster does not answer: {error}") from error


@contextmanager
def removing(what: str) -> Iterator[None]:
    """Removing goes on with the next, whatever it was that could not be removed."""
    try:
        yield
    except (Failed, client.ApiException, OSError, HTTPError) as error:
        if not (isinstance(error, client.ApiException) and error.status == 404):
            print(f"warning: {what} could not be removed: {' '.join(str(error).split())}", file=sys.stderr)
