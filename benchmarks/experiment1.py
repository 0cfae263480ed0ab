"""Two jobs of four GPUs on six: gang scheduling against elastic scheduling, with the same work.

    python -m benchmarks.experiment1 [--scale 2.25] [--seed 0] [--out DIR]
    python -m benchmarks.experiment1 --cluster kubeconfig --image IMAGE --volume ... --training_data ... --steps 5000

Two trainings of ResNet20, the second submitted 120 s (by the scale) after the first. Gang: four workers or none. Elastic:
one to four. --help lists all options; docs/experiments.md has the results.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.figures import Panel, draw_gpus
from benchmarks.experiments.lab import Lab, conducted, queue_flags
from benchmarks.experiments.measures import Change, Work, first_use, gpu_seconds, mean_gpus, work_conserving
from benchmarks.experiments.options import NO_QUEUE, OWN_QUEUE, Options, make_parser, natural, read, run
from benchmarks.experiments.training import STEP_COLUMNS, JobRun, Submission, Training, job_run, run_jobs, step_rows
from benchmarks.experiments.zoo.step_log import logged_steps
from benchmarks.harness import show_numbers, show_targets
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
OWNERS = {name: f"{name} job" for name in JOBS}
START_SECONDS = 120.0  # of a job, on a busy machine
REAL = (
    "API server, scheduler, pods, master, rendezvous, Horovod's reductions, the model's arithmetic, starting a worker"
)
SIMULATED = (
    "a sample takes a worker {pace:g} s, whatever its core needs; nvidia.com/gpu is what a node says it has; a container is a "
    "process; {gangs}. Work is {scale:g} times shorter than published; starting is not"
)
GANGS = {OWN_QUEUE: "by a small scheduler of these benchmarks", NO_QUEUE: "pod by pod, as there is no --queue"}
Numbers = Mapping[str, Any]
# Of the report's text; mean and GPU-seconds from the series behind its figure.
OF_A_MODE = ("makespan", "first ended", "second ended", "mean_gpus", "second_waited_for_gpus")
PUBLISHED: Numbers = {
    "gang": dict(zip(OF_A_MODE, (968, 465, 968, 3.73, 398), strict=True)),
    "elastic": dict(zip(OF_A_MODE, (809, 474, 809, 4.65, 0), strict=True)),
    "ratio": 0.836,
    "gpu_seconds_overhead": 0.044,
}
# Of elastic; the ratio and the overhead are to gang.
TARGETS = {
    "ratio": "<= 0.82",
    "second_first_step": "<= 10",
    "distance": "<= 0.05",
    "full_length_distance": "<= 0.05",
    "gpu_seconds_overhead": "<= 0.02",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Two jobs, on so many GPUs; ``job_gpu_seconds`` is the work of each without any overhead, ``scale`` times less than
    was published.
    """

    gpus: int
    workers: int
    second_after: float
    job_gpu_seconds: float
    scale: float

    def bound(self) -> float:
        """When all would be done if no usable GPU were ever free, and nothing took time but the work."""
        jobs = [Work(submitted, self.job_gpu_seconds, self.workers) for submitted in (0.0, self.second_after)]
        return max(work_conserving(jobs, self.gpus))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one mode."""

    changes: list[Change]
    jobs: list[JobRun]


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("experiment1", __doc__, SCALE, SECONDS_PER_SAMPLE)
    parser.add_argument("--gpus", type=int, default=GPUS, help=f"of the cluster that are used ({GPUS})")
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"the most that each job has ({WORKERS})")
    parser.add_argument("--steps", type=natural, default=0, help="of each job; needed with real GPUs")
    parser.add_argument("--global_batch_size", type=natural, default=0, help="samples a step over all workers")
    options = read(parser, argv)
    return run(parser, lambda: experiment(options, *planned(options)))


def planned(options: Options) -> tuple[Plan, Training]:
    if not 0 < options.workers < options.gpus < 2 * options.workers:
        raise UserError(f"--workers {options.workers} --gpus {options.gpus}: one job has to fit, and two must not")
    if not options.steps and not options.simulated:
        raise UserError("--steps is needed with real GPUs: as many as four of them make in about seven minutes")
    batch = options.global_batch_size or (SIMULATED_BATCH if options.simulated else REAL_BATCH)
    step = batch * options.seconds_per_sample
    steps = options.steps or max(round(options.workers * JOB_SECONDS / options.scale / step), 1)
    plan = Plan(options.gpus, options.workers, SECOND_AFTER / options.scale, steps * step, options.scale)
    return plan, Training(str(options.workers), steps, steps, batch, -(-batch // 2))


def experiment(options: Options, plan: Plan, training: Training) -> None:
    with conducted(options, plan.gpus, RESULTS, REAL, simulated(options)) as (lab, artefacts):
        told = {"targets": TARGETS, "published": PUBLISHED, "plan": asdict(plan), "training": asdict(training)}
        data = lab.training_data(STEPS_PER_EPOCH * training.global_batch)
        outcomes = {mode: measure(mode, lab, plan, training, data, artefacts) for mode in MODES}
        if not options.simulated:  # what the work is, real GPUs tell only by doing it
            job = outcomes["gang"].jobs[0]
            plan = replace(plan, job_gpu_seconds=step_gpu_seconds(job) * len(job.steps))
        numbers = {mode: measured(plan, outcome.changes, outcome.jobs) for mode, outcome in outcomes.items()}
        comparison = compared(**numbers)
        artefacts.summary({**numbers, "comparison": comparison, **told})
        artefacts.figure("gpus", lambda path: draw_gpus(path, panels(outcomes), OWNERS, plan.gpus))
        title = f"Two jobs of {plan.workers} GPUs on {plan.gpus}; work is {plan.scale:g} times shorter than published"
        show_numbers(title, {**numbers, **{f"{mode}, published": PUBLISHED[mode] for mode in MODES}})
        show_targets(comparison, TARGETS)


def simulated(options: Options) -> str:
    gangs = f"gangs are placed {GANGS.get(options.queue, f'by {options.queue}')}"
    if not options.simulated:
        return f"nothing; {gangs}"
    return SIMULATED.format(pace=options.seconds_per_sample, scale=options.scale, gangs=gangs)


def measure(mode: str, lab: Lab, plan: Plan, training: Training, data: str, artefacts: Artefacts) -> Outcome:
    """Run both jobs, and take down what happens."""
    options = lab.options
    patience = START_SECONDS + 4 * plan.bound() if options.simulated else 24 * 3600.0
    if mode == "gang":
        flags = [*training.flags(options, data), *queue_flags(options)]
    else:
        flags = replace(training, workers=f"1-{plan.workers}").flags(options, data)
    arrivals = dict(zip(JOBS, (0.0, plan.second_after), strict=True))
    jobs = [Submission(f"{mode}-{job}", after, flags) for job, after in arrivals.items()]
    ended, changes = run_jobs(mode, jobs, lab, artefacts, patience)
    runs = [job_run(each, logged_steps(lab.logs(each.name))) for each in ended]
    rows = [row for job in runs for row in step_rows(job.name, job.steps)]
    artefacts.table(f"steps-{mode}", STEP_COLUMNS, rows)
    return Outcome(changes, runs)


# ---- numbers ----


def step_gpu_seconds(job: JobRun) -> float:
    """What an ordinary step takes, all its workers together."""
    pairs = [(before, after) for before, after in pairwise(job.steps) if after.workers == before.workers]
    return median((after.time - before.time) * after.workers for before, after in pairs) if pairs else 0.0


def full_length_distance(plan: Plan, makespan: float, job: JobRun) -> float:
    """An estimate of how far above the bound an unscaled run would be: what each step takes too long grows with the
    work, and the rest (starting, joining, ending) does not.
    """
    slow = step_gpu_seconds(job) / (plan.job_gpu_seconds / len(job.steps)) - 1
    rest = makespan - plan.bound() * (1 + slow)
    return slow + rest / (plan.bound() * plan.scale)


def measured(plan: Plan, changes: Sequence[Change], jobs: Sequence[JobRun]) -> dict[str, Any]:
    """Of one mode; the times of ``jobs`` and ``changes`` count from the same moment."""
    last, second, bound = max(job.ended for job in jobs), jobs[1], plan.bound()
    makespan = last - jobs[0].submitted
    paid_until = max(last, *(change.time for change in changes))
    second_gpus = first_use(changes, second.name)
    return {
        "makespan": makespan,
        **{name: _job(job, changes, paid_until) for name, job in zip(JOBS, jobs, strict=True)},
        "mean_gpus": mean_gpus(changes, last),
        "gpu_seconds": gpu_seconds(changes, paid_until),
        "second_waited_for_gpus": second_gpus - second.submitted if second_gpus is not None else None,
        "second_began": second.began - second.submitted,
        "second_first_step": second.first_step - second.submitted,
        "lower_bound": bound,
        "distance": makespan / bound - 1,
        "full_length_distance": full_length_distance(plan, makespan, jobs[0]),
    }


def _job(job: JobRun, changes: Sequence[Change], until: float) -> dict[str, Any]:
    return {
        "name": job.name,
        "submitted": job.submitted,
        "first_gpu": first_use(changes, job.name),
        "began": job.began,
        "first_step": job.first_step,
        "step_gpu_seconds": step_gpu_seconds(job),
        "ended": job.ended,
        "steps": len({step.step for step in job.steps}),
        "gpu_seconds": gpu_seconds(changes, until, job.name),
        "last_loss": job.steps[-1].loss,
    }


def compared(gang: Numbers, elastic: Numbers) -> dict[str, float]:
    same = {name: elastic[name] for name in ("second_first_step", "distance", "full_length_distance")}
    overhead = elastic["gpu_seconds"] / gang["gpu_seconds"] - 1
    return {"ratio": elastic["makespan"] / gang["makespan"], **same, "gpu_seconds_overhead": overhead}


def panels(outcomes: Mapping[str, Outcome]) -> list[Panel]:
    ends = {mode: max(job.ended for job in outcome.jobs) for mode, outcome in outcomes.items()}
    return [
        Panel(
            MODES[mode],
            outcome.changes,
            max(ends.values()),
            {"second job submitted": outcome.jobs[1].submitted, "all done": ends[mode]},
            prefix=f"{mode}-",
        )
        for mode, outcome in outcomes.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
