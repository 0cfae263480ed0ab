"""Two jobs of four GPUs on six: gang scheduling against elastic scheduling, with the same work.

    python -m benchmarks.experiment1 [--scale 2.5] [--seed 0] [--out DIR]
    python -m benchmarks.experiment1 --cluster kubeconfig --image IMAGE --volume ... --training_data ... --steps 5000

Two trainings of ResNet20, the second submitted 120 s (by the scale) after the first. Gang: four workers or none. Elastic:
one to four. --help lists all options; docs/benchmarks.md has the results.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.figures import Chart, Panel
from benchmarks.experiments.jobs import JobRun, job_run, write_steps
from benchmarks.experiments.lab import Lab, job_is_over, open_lab, queue_flags
from benchmarks.experiments.measures import Change
from benchmarks.experiments.options import NO_QUEUE, Options, make_parser, read, run
from benchmarks.experiments.overlap import (
    PUBLISHED,
    TARGETS,
    Plan,
    compared,
    measured,
    step_gpu_seconds,
    table,
    verdicts,
)
from benchmarks.experiments.series import GpuSeries
from benchmarks.experiments.training import Training
from benchmarks.experiments.zoo.step_log import logged_steps
from benchmarks.harness import describe_machine, machine_facts, show_table
from benchmarks.processes import Failed
from elasticdl.common.errors import UserError

SCALE = 2.5
SECONDS_PER_SAMPLE = 0.1
# Published: on six GPUs a job of four takes 450 s, and the second comes at 120 s.
GPUS, WORKERS, JOB_SECONDS, SECOND_AFTER = 6, 4, 450.0, 120.0
SIMULATED_BATCH, REAL_BATCH = 36, 512
STEPS_PER_EPOCH = 20  # of the stand-in for CIFAR-10
MODES: Mapping[str, str] = {"gang": "gang scheduling", "elastic": "elastic scheduling"}
JOBS = ("first", "second")
REAL = (
    "API server, scheduler, pods, master, rendezvous, Horovod's reductions, the model's arithmetic, starting a worker"
)
SIMULATED = (
    "a sample takes a worker {pace:g} s, whatever its core needs; nvidia.com/gpu is what a node says it has; a container is a "
    "process; gangs are placed by a small scheduler of these benchmarks. Work is {scale:g} times shorter than published; "
    "starting is not"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What both modes have in common."""

    options: Options
    plan: Plan
    training: Training


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one mode."""

    changes: list[Change]
    jobs: list[JobRun]
    numbers: dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("experiment1", __doc__, SCALE, SECONDS_PER_SAMPLE)
    parser.add_argument("--gpus", type=int, default=GPUS, help=f"of the cluster that are used ({GPUS})")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"the most that each job has ({WORKERS})")
    parser.add_argument("--steps", type=int, default=0, help="of each job; needed with real GPUs")
    parser.add_argument("--global_batch_size", type=int, default=0, help="samples a step over all workers")
    options, args = read(parser, argv)
    return run(parser, lambda: experiment(make_setting(options, args)))


def make_setting(options: Options, args: argparse.Namespace) -> Setting:
    """Raises:
    UserError: with real GPUs nobody but the user knows how long a step takes.
    """
    if not 0 < args.workers < args.gpus < 2 * args.workers:
        raise UserError(f"--workers {args.workers} --gpus {args.gpus}: one job has to fit, and two must not")
    batch = args.global_batch_size or (SIMULATED_BATCH if options.simulated else REAL_BATCH)
    steps = args.steps
    if not steps and not options.simulated:
        raise UserError("--steps is needed with real GPUs: as many as four of them make in about seven minutes")
    gpu_seconds = batch * options.seconds_per_sample
    steps = steps or max(round(args.workers * JOB_SECONDS / options.scale / gpu_seconds), 1)
    training = Training(str(args.workers), steps, epochs=steps, global_batch=batch, micro_batch=-(-batch // 2))
    return Setting(
        options,
        Plan(args.gpus, args.workers, SECOND_AFTER / options.scale, steps * gpu_seconds, options.scale),
        training,
    )


def experiment(setting: Setting) -> None:
    options, artefacts = setting.options, Artefacts(setting.options.out)
    artefacts.discard("*.csv", "*.jsonl", "*.log", "summary.json", "gpus.*")
    machine = machine_facts()
    print(describe_machine(machine))
    print(f"real: {REAL}")
    print(f"simulated: {simulated(options)}", flush=True)
    with open_lab(options, setting.plan.gpus) as lab:
        data = lab.training_data(STEPS_PER_EPOCH * setting.training.global_batch)
        outcomes = {mode: measure(mode, lab, setting, data) for mode in MODES}
    if not options.simulated:
        outcomes = with_work_of_gang(setting.plan, outcomes)
    gang, elastic = (outcomes[mode].numbers for mode in MODES)
    comparison = compared(gang, elastic)
    path = artefacts.summary(
        {
            "gang": gang,
            "elastic": elastic,
            "comparison": comparison,
            "targets": TARGETS,
            "published": PUBLISHED,
            "plan": asdict(setting.plan),
            "training": asdict(setting.training),
            "scale": options.scale,
            "seed": options.seed,
            "real": REAL,
            "simulated": simulated(options),
            "machine": machine,
        }
    )
    artefacts.figure("gpus", chart(outcomes, setting.plan.gpus).save)
    columns = ("", "gang", "elastic", "gang, published", "elastic, published")
    show_table(f"Two jobs of {setting.plan.workers} GPUs on {setting.plan.gpus}; work is {options.scale:g} times shorter than published", columns,
        table(gang, elastic))  # fmt: skip
    show_table("Targets", ("", "ours", "target", "published", "met"), verdicts(comparison))
    print(f"results: {path.parent}")


def simulated(options: Options) -> str:
    if not options.simulated:
        return "nothing" + (
            ", but without a --queue pods of a gang are placed one by one" * (options.queue == NO_QUEUE)
        )
    return SIMULATED.format(pace=options.seconds_per_sample, scale=options.scale)


def measure(mode: str, lab: Lab, setting: Setting, data: str) -> Outcome:
    """Run both jobs, and take down what happens."""
    artefacts, plan = Artefacts(setting.options.out), setting.plan
    flags = replace(
        setting.training, workers=setting.training.workers if mode == "gang" else f"1-{plan.workers}"
    ).flags(setting.options, data)
    flags += queue_flags(setting.options) if mode == "gang" else []
    patience = 300 + 4 * plan.bound() if setting.options.simulated else 24 * 3600.0
    submitted: dict[str, float] = {}
    with GpuSeries(lab.core, lab.namespace, artefacts.path(f"gpus-{mode}.csv")) as series:
        for job, after in zip(JOBS, (0.0, plan.second_after), strict=True):
            time.sleep(max(0.0, after - series.now()))
            submitted[job] = series.now()
            lab.submit(f"{mode}-{job}", flags)
            print(f"{mode}: {job} job submitted at {submitted[job]:.1f} s", flush=True)
        try:
            for job in JOBS:
                name = f"{mode}-{job}"
                series.wait(functools.partial(job_is_over, job=name), patience, f"the end of {name}")
                print(f"{mode}: {job} job over at {series.now():.1f} s", flush=True)
            runs = [collect(f"{mode}-{job}", submitted[job], lab, artefacts, series.epoch) for job in JOBS]
        except Failed:
            keep_logs(mode, lab, artefacts)
            raise
        changes = series.changes
    write_steps(artefacts.path(f"steps-{mode}.csv"), runs)
    return Outcome(changes, runs, measured(plan, changes, runs))


def collect(name: str, submitted: float, lab: Lab, artefacts: Artefacts, epoch: float) -> JobRun:
    journal = lab.journal(name)
    artefacts.journal(f"events-{name}", journal)
    return job_run(name, submitted, epoch, journal, list(logged_steps(lab.logs(name))))


def keep_logs(mode: str, lab: Lab, artefacts: Artefacts) -> None:
    """Of jobs that did not do as they should; they go with the lab."""
    for job in JOBS:
        try:
            artefacts.path(f"{mode}-{job}.log").write_text("\n".join(lab.logs(f"{mode}-{job}")))
        except Failed as error:
            print(f"warning: {error}", file=sys.stderr)


def with_work_of_gang(plan: Plan, outcomes: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """The bound that goes with what a step took on real GPUs."""
    job = outcomes["gang"].jobs[0]
    real = replace(plan, job_gpu_seconds=step_gpu_seconds(job) * len(job.steps))
    return {
        mode: replace(outcome, numbers=measured(real, outcome.changes, outcome.jobs))
        for mode, outcome in outcomes.items()
    }


def chart(outcomes: Mapping[str, Outcome], gpus: int) -> Chart:
    end = max(outcome.numbers["makespan"] for outcome in outcomes.values())
    panels = []
    for mode, outcome in outcomes.items():
        named = [replace(change, owner=change.owner.removeprefix(f"{mode}-")) for change in outcome.changes]
        marks = {"second job submitted": outcome.jobs[1].submitted, "all done": outcome.numbers["makespan"]}
        panels.append(Panel(MODES[mode], named, end, marks))
    return Chart(panels, {"first": "first job", "second": "second job"}, gpus)


if __name__ == "__main__":
    sys.exit(main())
