"""Two jobs of four GPUs on six: gang scheduling against elastic scheduling, with the same work.

    python -m benchmarks.experiment1 [--scale 2.25] [--seed 0] [--out DIR]
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
from benchmarks.experiments.options import NO_QUEUE, OWN_QUEUE, Options, make_parser, read, require_gpus, run
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

SCALE = 2.25
# So long that the arithmetic of six workers takes a small part of two cores.
SECONDS_PER_SAMPLE = 0.3
# Published: on six GPUs a job of four takes 450 s, and the second comes at 120 s.
GPUS, WORKERS, JOB_SECONDS, SECOND_AFTER = 6, 4, 450.0, 120.0
SIMULATED_BATCH, REAL_BATCH = 12, 512
RESULTS = ("gpus-*.csv", "steps-*.csv", "events-*.jsonl", "gang-*.log", "elastic-*.log", "summary.json", "gpus.*")
STEPS_PER_EPOCH = 20  # of the stand-in for CIFAR-10
MODES: Mapping[str, str] = {"gang": "gang scheduling", "elastic": "elastic scheduling"}
JOBS = ("first", "second")
START_SECONDS = 120.0  # of a job, on a busy machine
REAL = (
    "API server, scheduler, pods, master, rendezvous, Horovod's reductions, the model's arithmetic, starting a worker"
)
SIMULATED = (
    "a sample takes a worker {pace:g} s, whatever its core needs; nvidia.com/gpu is what a node says it has; a container is a "
    "process; {gangs}. Work is {scale:g} times shorter than published; starting is not"
)
GANGS: Mapping[str, str] = {
    OWN_QUEUE: "gangs are placed by a small scheduler of these benchmarks",
    NO_QUEUE: "a gang is placed pod by pod, as there is no --queue",
}


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
    require_gpus(options)
    for name in ("steps", "global_batch_size"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name} {getattr(args, name)}: must be above 0")
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
    artefacts = Artefacts(setting.options.out)
    with artefacts.claimed():
        conduct(setting, artefacts)


def conduct(setting: Setting, artefacts: Artefacts) -> None:
    options, machine = setting.options, machine_facts()
    print(describe_machine(machine))
    print(f"real: {REAL}")
    print(f"simulated: {simulated(options)}", flush=True)
    with open_lab(options, setting.plan.gpus) as lab:
        artefacts.discard(*RESULTS)
        data = lab.training_data(STEPS_PER_EPOCH * setting.training.global_batch)
        outcomes = {mode: measure(mode, lab, setting, data) for mode in MODES}
    numbers = analysed(setting, outcomes)
    artefacts.summary(summary(setting, numbers, machine))
    artefacts.figure("gpus", chart(outcomes, setting.plan.gpus).save)
    show(setting, numbers)


def analysed(setting: Setting, outcomes: Mapping[str, Outcome]) -> dict[str, dict[str, Any]]:
    """The numbers of each mode. What the work is, real GPUs tell only by doing it."""
    plan, job = setting.plan, outcomes["gang"].jobs[0]
    if not setting.options.simulated:
        plan = replace(plan, job_gpu_seconds=step_gpu_seconds(job) * len(job.steps))
    return {mode: measured(plan, outcome.changes, outcome.jobs) for mode, outcome in outcomes.items()}


def summary(setting: Setting, numbers: Mapping[str, Mapping[str, Any]], machine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **numbers,
        "comparison": compared(**numbers),
        "targets": TARGETS,
        "published": PUBLISHED,
        "plan": asdict(setting.plan),
        "training": asdict(setting.training),
        "scale": setting.options.scale,
        "seed": setting.options.seed,
        "real": REAL,
        "simulated": simulated(setting.options),
        "machine": machine,
    }


def show(setting: Setting, numbers: Mapping[str, Mapping[str, Any]]) -> None:
    plan = setting.plan
    title = f"Two jobs of {plan.workers} GPUs on {plan.gpus}; work is {plan.scale:g} times shorter than published"
    show_table(title, ("", "gang", "elastic", "gang, published", "elastic, published"), table(**numbers))
    show_table("Targets", ("", "ours", "target", "published", "met"), verdicts(compared(**numbers)))
    print(f"results: {setting.options.out}")


def simulated(options: Options) -> str:
    if options.simulated:
        gangs = GANGS.get(options.queue, f"gangs are placed by {options.queue}")
        return SIMULATED.format(pace=options.seconds_per_sample, scale=options.scale, gangs=gangs)
    return "nothing" if options.queue != NO_QUEUE else "nothing, but without a --queue a gang is placed pod by pod"


def measure(mode: str, lab: Lab, setting: Setting, data: str) -> Outcome:
    """Run both jobs, and take down what happens."""
    artefacts, plan = Artefacts(setting.options.out), setting.plan
    patience = START_SECONDS + 4 * plan.bound() if setting.options.simulated else 24 * 3600.0
    flags = flags_of(mode, setting, data)
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
            keep_traces(mode, lab, artefacts)
            raise
        write_steps(artefacts.path(f"steps-{mode}.csv"), {job.name: job.steps for job in runs})
        return Outcome(series.changes, runs)


def flags_of(mode: str, setting: Setting, data: str) -> list[str]:
    if mode == "gang":
        return [*setting.training.flags(setting.options, data), *queue_flags(setting.options)]
    return replace(setting.training, workers=f"1-{setting.plan.workers}").flags(setting.options, data)


def collect(name: str, submitted: float, lab: Lab, artefacts: Artefacts, epoch: float) -> JobRun:
    journal = lab.journal(name)
    artefacts.journal(f"events-{name}", journal)
    return job_run(name, submitted, epoch, journal, list(logged_steps(lab.logs(name))))


def keep_traces(mode: str, lab: Lab, artefacts: Artefacts) -> None:
    """Of jobs that did not do as they should; they go with the lab."""
    for name in (f"{mode}-{job}" for job in JOBS):
        try:
            artefacts.path(f"{name}.log").write_text("\n".join(lab.logs(name)))
            artefacts.journal(f"events-{name}", lab.journal(name))
        except Failed as error:
            print(f"warning: {error}", file=sys.stderr)


def chart(outcomes: Mapping[str, Outcome], gpus: int) -> Chart:
    ends = {mode: max(job.ended for job in outcome.jobs) for mode, outcome in outcomes.items()}
    panels = []
    for mode, outcome in outcomes.items():
        named = [replace(change, owner=change.owner.removeprefix(f"{mode}-")) for change in outcome.changes]
        marks = {"second job submitted": outcome.jobs[1].submitted, "all done": ends[mode]}
        panels.append(Panel(MODES[mode], named, max(ends.values()), marks))
    return Chart(panels, {"first": "first job", "second": "second job"}, gpus)


if __name__ == "__main__":
    sys.exit(main())
