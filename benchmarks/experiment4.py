"""Eight jobs that scale unequally share eight GPUs.

    python -m benchmarks.experiment4 [--scale 1] [--seed 0] [--policies fixed4,greedy,share] [--out DIR]

The jobs come one after the other, drawn from a seed, and are the same under each policy: fixed sizes, everybody takes what is
free, AdaptDL's published rule by a scheduler above the jobs, and jobs that share by themselves (`--share_queue`).
--help lists all options; docs/experiments.md has the results.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.figures import Panel, draw_gpus
from benchmarks.experiments.lab import Lab, conducted
from benchmarks.experiments.measures import Change, gpu_seconds
from benchmarks.experiments.options import Options, make_parser, read, run
from benchmarks.experiments.sharing import BATCH, POLICIES, STEP_SECONDS, PlannedJob, Policy, Scheduler, draw_jobs
from benchmarks.experiments.training import HEARTBEAT_SECONDS, THREADS, Ended, Submission, run_jobs
from benchmarks.experiments.zoo.scaling import VARIABLE
from benchmarks.harness import show_numbers, show_targets
from benchmarks.job import flags_of, success_of
from benchmarks.processes import Failed
from elasticdl.common.errors import UserError

GPUS = 8
PATIENCE = 3600.0
MODEL = "benchmarks.experiments.zoo.scaling"
# Of the mean completion, against the better of fixed sizes and of everybody taking what is free.
TARGETS = {"to_best_simple": "<= 0.8"}
RESULTS = ("gpus-*.csv", "events-*.jsonl", "*.log", "summary.json", "gpus.*")
REAL = "API server, scheduler, pods, masters, rendezvous, reductions, starting a worker, what each job learns of its scaling"
SIMULATED = (
    "the time that a sample takes a worker and a reduction the network, whatever core and loopback need; nvidia.com/gpu is "
    "what a node says it has; a container is a process"
)


@dataclass(frozen=True, slots=True)
class Setting:
    options: Options
    gpus: int
    jobs: Sequence[PlannedJob]
    policies: Sequence[Policy]


@dataclass(frozen=True, slots=True)
class Completed:
    """Times in seconds since the first job was submitted."""

    job: PlannedJob
    submitted: float
    ended: float
    worlds: int

    @property
    def seconds(self) -> float:
        """From its submission to its end."""
        return self.ended - self.submitted


@dataclass(frozen=True, slots=True)
class Outcome:
    """Under one policy."""

    jobs: list[Completed]
    changes: list[Change]


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("experiment4", __doc__, 1.0, STEP_SECONDS / BATCH)
    names = ",".join(policy.name for policy in POLICIES)
    parser.add_argument("--gpus", type=int, default=GPUS, help=f"of the cluster that are used ({GPUS})")
    parser.add_argument("--policies", default=names, help=f"which, in this order ({names})")
    options = read(parser, argv)
    return run(parser, lambda: experiment(make_setting(options)))


def make_setting(options: Options) -> Setting:
    if not options.simulated:
        raise UserError("--seconds_per_sample: the jobs are simulated, whose scaling is known; it must be above 0")
    known = {policy.name: policy for policy in POLICIES}
    wanted = options.policies.split(",")
    if wrong := next((name for name in wanted if name not in known), ""):
        raise UserError(f"--policies: there is no {wrong!r}; choose from {', '.join(known)}")
    largest = 4 if "fixed4" in wanted else 2
    if options.gpus < largest:
        raise UserError(f"--gpus {options.gpus}: at least {largest}")
    return Setting(options, options.gpus, draw_jobs(options.seed, options.scale), [known[name] for name in wanted])


def experiment(setting: Setting) -> None:
    with conducted(setting.options, setting.gpus, RESULTS, REAL, SIMULATED) as (lab, artefacts):
        outcomes = {policy: measure(policy, lab, setting, artefacts) for policy in setting.policies}
        numbers = {policy.name: measured(outcome) for policy, outcome in outcomes.items()}
        comparison = compared(numbers)
        workload = [{**asdict(job), "work": job.work} for job in setting.jobs]
        told = {"comparison": comparison, "targets": TARGETS, "workload": workload, "gpus": setting.gpus}
        artefacts.summary({**numbers, **told})
        panels, owners = [panel(*each) for each in outcomes.items()], {job.name: job.name for job in setting.jobs}
        artefacts.figure("gpus", lambda path: draw_gpus(path, panels, owners, setting.gpus))
        columns = {policy.name: {**numbers[policy.name], "jobs": ()} for policy in setting.policies}
        show_numbers(f"{len(setting.jobs)} jobs on {setting.gpus} GPUs", columns)
        if comparison:
            show_targets(comparison, TARGETS)


def measure(policy: Policy, lab: Lab, setting: Setting, artefacts: Artefacts) -> Outcome:
    """Submit all jobs in their time, and wait for their ends."""
    names = {f"{policy.name}-{job.name}": job for job in setting.jobs}
    jobs = [Submission(name, job.arrival, flags_for(policy, job, lab, setting)) for name, job in names.items()]
    with Scheduler(lab, setting.gpus) if policy.scheduled else nullcontext() as scheduler:
        tell = scheduler.run_these if scheduler else lambda running: None
        ended, changes = run_jobs(policy.name, jobs, lab, artefacts, PATIENCE, tell)
        completed = [collect(names[each.name], each, lab, artefacts) for each in ended]
    return Outcome(completed, changes)


def flags_for(policy: Policy, job: PlannedJob, lab: Lab, setting: Setting) -> list[str]:
    kind, seconds = job.kind, BATCH * setting.options.seconds_per_sample
    step = (kind.serial * seconds, (1 - kind.serial) * seconds / BATCH, kind.network * seconds, kind.growth * seconds)
    given = {
        "model_zoo": setting.options.repository,
        "model_def": MODEL,
        "training_data": BATCH * job.steps,
        "num_epochs": 1,
        "global_batch_size": BATCH,
        "worker_resource_request": "cpu=0.1,memory=1Gi,gpu=1",
        "heartbeat_timeout": HEARTBEAT_SECONDS,
        "envs": f"{VARIABLE}={';'.join(f'{value:g}' for value in step)},{THREADS}",
    }
    return [*flags_of(given), *policy.flags(lab, setting.gpus)]


def collect(job: PlannedJob, ended: Ended, lab: Lab, artefacts: Artefacts) -> Completed:
    try:
        end = success_of(ended.name, ended.journal)
        if end["steps"] != job.steps:
            raise Failed(f"job {ended.name} was to make {job.steps} steps, and has made {end['steps']}")
    except Failed:
        lab.keep_traces([ended.name], artefacts)
        raise
    worlds = sum(entry["event"] == "world_formed" for entry in ended.journal)
    return Completed(job, ended.submitted, end["time"] - ended.epoch, worlds)


def measured(outcome: Outcome) -> dict[str, Any]:
    """``goodput``: seconds of work for one worker that are done in a second."""
    jobs, end = outcome.jobs, max(each.ended for each in outcome.jobs)
    makespan = end - min(each.submitted for each in jobs)
    return {
        "mean_completion": fmean(each.seconds for each in jobs),
        "makespan": makespan,
        "goodput": sum(each.job.work for each in jobs) / makespan,
        "gpu_seconds": gpu_seconds(outcome.changes, end),
        "worlds": sum(each.worlds for each in jobs),
        "jobs": {each.job.name: {"submitted": each.submitted, "seconds": each.seconds} for each in jobs},
    }


def compared(numbers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Ours against the others that were run."""
    if "share" not in numbers:
        return {}
    ours = numbers["share"]["mean_completion"]
    ratios = {name: ours / each["mean_completion"] for name, each in numbers.items() if name != "share"}
    simple = [ratio for name, ratio in ratios.items() if name != "adaptdl"]
    return {"ratios": ratios, **({"to_best_simple": max(simple)} if simple else {})}


def panel(policy: Policy, outcome: Outcome) -> Panel:
    end = max(job.ended for job in outcome.jobs)
    return Panel(policy.title, outcome.changes, end, {"all done": end}, prefix=f"{policy.name}-")


if __name__ == "__main__":
    sys.exit(main())
