"""Experiment 3: changing the number of workers does not hurt the model.

ResNet20 is trained with two workers, with four, and with two to four that come and go at random steps; by both policies
for batch size and learning rate; with several seeds. Each job runs on a cluster, as pods.

On tier 1 it is trained on 864 of scikit-learn's digits, brought to CIFAR-10's shape, and the published schedule of 90
epochs is compressed by --scale. With CIFAR-10 (--data, or --training_data on a cluster of yours) give --scale 1.
All that is computed is real; there are no simulated GPUs in this experiment but those that the test nodes advertise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.convergence.course import Course
from benchmarks.experiments.convergence.curves import COLUMNS, Curve, panels, rows, summarise, tables, targets
from benchmarks.experiments.convergence.plan import (
    CIFAR10,
    DIGITS,
    MOST,
    PUBLISHED_EPOCHS,
    Data,
    Job,
    Policy,
    Recipe,
    make_jobs,
)
from benchmarks.experiments.figures import draw_accuracies
from benchmarks.experiments.lab import Lab, conducted
from benchmarks.experiments.options import ClusterKind, Options, counting, make_parser, read, run
from benchmarks.experiments.pods import GpuSeries
from benchmarks.harness import flat, show_table, show_targets
from elasticdl.common.errors import UserError

SCALE = 18.0  # five epochs: about 95 % of the digits are learned by then
REAL = "API server, scheduler, pods, master, rendezvous, Horovod's reductions, all that is computed"
SIMULATED = "nvidia.com/gpu is what a node says it has, and a container is a process; nothing of what is computed"
CHANGES = 4  # of workers, in an elastic job
RESULTS = ("summary.json", "experiment3.*", "accuracy.csv", "losses.csv", "gpus.csv", "batch-*.jsonl", "rate-*.jsonl")
TITLES = {Data.DIGITS: "ResNet20 on handwritten digits", Data.CIFAR10: "ResNet20 on CIFAR-10"}


class Experiment:
    """What has been done is in --out after each job, so that an interruption leaves it."""

    def __init__(self, jobs: Sequence[Job], recipe: Recipe, artefacts: Artefacts) -> None:
        self._jobs = jobs
        self._recipe = recipe
        self._artefacts = artefacts
        self._curves: dict[str, Curve] = {}
        self._lock = threading.Lock()

    def run(self, lab: Lab, shared: Path, at_once: int) -> None:
        given_up = threading.Event()
        course = Course(lab, self._recipe, shared, given_up)
        with ThreadPoolExecutor(at_once) as lanes:
            try:
                courses = [lanes.submit(self._keep, course, job) for job in self._jobs]
                done, _ = wait(courses, return_when=FIRST_EXCEPTION)
            finally:  # an interruption, too
                given_up.set()
                lanes.shutdown(cancel_futures=True)
            for each in done:
                each.result()
        show_table(TITLES[self._recipe.data], COLUMNS, rows(self._done()))
        summary = summarise(self._done())
        show_targets(flat(summary), targets(summary))

    def _keep(self, course: Course, job: Job) -> None:
        result = course.run(job)
        curve = Curve.of(result)
        self._artefacts.journal(result.job.name, result.journal)
        with self._lock:
            self._curves[result.job.name] = curve
            self._write()
            done = f"{len(self._curves)}/{len(self._jobs)}"
        print(f"{done} {result.job.name}: {len(curve.losses)} steps, accuracy {curve.accuracies[-1]:.4f}", flush=True)

    def _done(self) -> list[Curve]:
        return [self._curves[job.name] for job in self._jobs if job.name in self._curves]

    def _write(self) -> None:
        curves, recipe = self._done(), self._recipe
        for name, (columns, rows_of_jobs) in tables(curves).items():
            self._artefacts.table(name, columns, rows_of_jobs)
        facts = {
            "data": recipe.data,
            "epochs": self._jobs[0].epochs,
            "published_epochs": PUBLISHED_EPOCHS,
            "training_images": recipe.samples,
            "worker_batch": recipe.worker_batch,
            "global_batch": recipe.global_batch,
            "jobs_done": len(curves),
            "jobs_planned": len(self._jobs),
        }
        summary = summarise(curves)
        self._artefacts.summary({**facts, **summary, "targets": targets(summary)})
        self._artefacts.figure("experiment3", lambda path: draw_accuracies(path, TITLES[recipe.data], panels(curves)))


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("experiment3", __doc__, SCALE, seconds_per_sample=0)
    parser.add_argument("--data", type=Path, help="CIFAR-10's archive, to train on instead of digits (tier1)")
    parser.add_argument("--seeds", type=counting, default=3, help="from --seed on (3)")
    parser.add_argument("--at_once", type=counting, default=2, help="jobs; each needs up to four GPUs (2)")
    parser.add_argument("--shared", type=Path, help="with --cluster kubeconfig: a folder that the pods see under the same path")  # fmt: skip
    options = read(parser, argv)
    return run(parser, lambda: _run(options))


def _run(options: Options) -> None:
    _check_data(options)
    recipe = CIFAR10 if options.training_data else DIGITS
    jobs, simulated = _jobs(recipe, options), SIMULATED if options.cluster is ClusterKind.TIER1 else "nothing"
    with (
        conducted(options, MOST * options.at_once, RESULTS, REAL, simulated) as (lab, artefacts),
        GpuSeries(lab.core, lab.namespace, artefacts.folder / "gpus.csv"),
    ):
        Experiment(jobs, recipe, artefacts).run(lab, options.shared or lab.folder, options.at_once)


def _check_data(options: Options) -> None:
    tier1 = options.cluster is ClusterKind.TIER1
    if tier1 and options.shared:
        raise UserError("--shared is for --cluster kubeconfig; tier1 has its own")
    if not tier1 and (options.data or not options.shared):
        raise UserError("--cluster kubeconfig needs --shared, and takes --training_data instead of --data")
    if options.data and not options.data.exists():
        raise UserError(f"--data {options.data}: there is no such file; give cifar-10-python.tar.gz as it is published")
    if options.data:
        options.training_data = str(options.data.resolve())


def _jobs(recipe: Recipe, options: Options) -> list[Job]:
    epochs = max(1, round(PUBLISHED_EPOCHS / options.scale))
    seeds = range(options.seed, options.seed + options.seeds)
    try:
        return make_jobs(recipe, list(Policy), seeds, epochs, CHANGES)
    except ValueError as error:
        raise UserError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
