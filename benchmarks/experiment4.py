"""Eight jobs that scale unequally share eight GPUs.

    python -m benchmarks.experiment4 [--scale 1] [--seed 0] [--policies fixed4,greedy,share] [--out DIR]

The jobs come one after the other, drawn from a seed, and are the same under each policy: fixed sizes, everybody takes what is
free, AdaptDL's published rule by a scheduler above the jobs, and jobs that share by themselves (`--share_queue`).
--help lists all options; docs/benchmarks.md has the results.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.figures import Chart, Panel
from benchmarks.experiments.lab import Lab, job_is_over, open_lab
from benchmarks.experiments.measures import Change
from benchmarks.experiments.options import Options, make_parser, read, require_gpus, run
from benchmarks.experiments.series import GpuSeries
from benchmarks.experiments.sharing.outcome import TARGET, Completed, compared, measured, table
from benchmarks.experiments.sharing.policies import POLICIES, Policy, Scheduler
from benchmarks.experiments.sharing.workload import BATCH, STEP_SECONDS, PlannedJob, draw_jobs
from benchmarks.experiments.zoo.scaling import VARIABLE
from benchmarks.harness import describe_machine, machine_facts, show_table
from benchmarks.processes import Failed
from elasticdl.common.errors import UserError

SCALE = 1.0
GPUS = 8
PATIENCE = 3600.0
MODEL = "benchmarks.experiments.zoo.scaling"
# Workers that are more than there are cores may be silent for longer than the default without being frozen.
HEARTBEAT_SECONDS = 15.0
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
class Outcome:
    """Under one policy."""

    jobs: list[Completed]
    changes: list[Change]


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("experiment4", __doc__, SCALE, STEP_SECONDS / BATCH)
    names = ",".join(policy.name for policy in POLICIES)
    parser.add_argument("--gpus", type=int, default=GPUS, help=f"of the cluster that are used ({GPUS})")
    parser.add_argument("--policies", default=names, help=f"which, in this order ({names})")
    parser.add_argument("--jobs", type=int, default=0, help="only so many of the first (all)")
    options, args = read(parser, argv)
    return run(parser, lambda: experiment(make_setting(options, args)))


def make_setting(options: Options, args: argparse.Namespace) -> Setting:
    """Raises:
    UserError: there is no such policy, or the cluster has real GPUs, whose jobs scale as they like.
    """
    require_gpus(options)
    if not options.simulated:
        raise UserError("--seconds_per_sample: the jobs are simulated, whose scaling is known; it must be above 0")
    known = {policy.name: policy for policy in POLICIES}
    wanted = args.policies.split(",")
    if wrong := next((name for name in wanted if name not in known), ""):
        raise UserError(f"--policies: there is no {wrong!r}; choose from {', '.join(known)}")
    largest = 4 if "fixed4" in wanted else 2
    if args.gpus < largest or args.jobs < 0:
        raise UserError(f"--gpus {args.gpus} --jobs {args.jobs}: at least {largest} GPUs, and no fewer jobs than 0")
    jobs = draw_jobs(options.seed, options.scale)
    return Setting(options, args.gpus, jobs[: args.jobs or None], [known[name] for name in wanted])


def experiment(setting: Setting) -> None:
    artefacts = Artefacts(setting.options.out)
    with artefacts.claimed():
        conduct(setting, artefacts)


def conduct(setting: Setting, artefacts: Artefacts) -> None:
    machine = machine_facts()
    print(describe_machine(machine))
    print(f"real: {REAL}")
    print(f"simulated: {SIMULATED}", flush=True)
    outcomes: dict[str, Outcome] = {}
    with open_lab(setting.options, setting.gpus) as lab:
        artefacts.discard(*RESULTS)
        for policy in setting.policies:
            outcomes[policy.name] = measure(policy, lab, setting, artefacts)
    numbers = {name: measured(outcome.jobs, outcome.changes) for name, outcome in outcomes.items()}
    comparison = compared(numbers)
    artefacts.summary(
        {
            **numbers,
            "comparison": comparison,
            "target": TARGET,
            "workload": [{**asdict(job), "work": job.work} for job in setting.jobs],
            "gpus": setting.gpus,
            "scale": setting.options.scale,
            "seed": setting.options.seed,
            "real": REAL,
            "simulated": SIMULATED,
            "machine": machine,
        }
    )
    artefacts.figure("gpus", chart(outcomes, setting).save)
    show(setting, numbers, comparison)


def show(setting: Setting, numbers: dict[str, dict[str, object]], comparison: dict[str, object]) -> None:
    titles = {policy.name: policy.title for policy in setting.policies}
    columns = ("", "mean completion", "makespan", "goodput", "GPU-seconds", "worlds")
    show_table(f"{len(setting.jobs)} jobs on {setting.gpus} GPUs", columns, table(numbers, titles))
    if "to_best_simple" in comparison:
        ratio = float(str(comparison["to_best_simple"]))
        rows = [("mean completion to the better simple policy", f"{ratio:.3f}", str(TARGET), str(ratio <= TARGET))]
        show_table("Target", ("", "ours", "target", "met"), rows)
    print(f"results: {setting.options.out}")


def measure(policy: Policy, lab: Lab, setting: Setting, artefacts: Artefacts) -> Outcome:
    """Submit all jobs in their time, and wait for their ends."""
    ended: dict[str, float] = {}
    submitted: dict[str, float] = {}
    with ExitStack() as stack:
        path = artefacts.path(f"gpus-{policy.name}.csv")
        series = stack.enter_context(GpuSeries(lab.core, lab.namespace, path))
        scheduler = stack.enter_context(Scheduler(lab, setting.gpus)) if policy.scheduled else None
        threads = []
        for job in setting.jobs:
            time.sleep(max(0.0, job.arrival - series.now()))
            name = name_of(policy, job)
            submitted[name] = series.now()
            lab.submit(name, flags_of(policy, job, lab, setting))
            print(f"{policy.name}: {job.name} submitted at {submitted[name]:.1f} s", flush=True)
            if scheduler:
                scheduler.began(name)
            threads.append(follow(name, series, ended, scheduler))
        for thread in threads:
            thread.join()
        if missing := [name for name in submitted if name not in ended]:
            keep_traces(missing, lab, artefacts)
            raise Failed(f"{policy.name}: {', '.join(missing)} did not end within {PATIENCE:g} s")
        print(f"{policy.name}: all over at {series.now():.1f} s", flush=True)
        if scheduler and scheduler.failure:
            print(f"warning: {scheduler.failure}", file=sys.stderr)
        jobs = [collect(policy, job, submitted, ended, lab, artefacts, series.epoch) for job in setting.jobs]
        own = {name_of(policy, job) for job in setting.jobs}
        changes = [change for change in series.changes if change.owner in own]
    for name in submitted:
        lab.delete(name)
    return Outcome(jobs, changes)


def follow(name: str, series: GpuSeries, ended: dict[str, float], scheduler: Scheduler | None) -> threading.Thread:
    """Take down when the job is over."""

    def wait() -> None:
        try:
            series.wait(partial(job_is_over, job=name), PATIENCE, f"the end of {name}")
        except Failed as error:
            print(f"warning: {error}", file=sys.stderr)
            return
        ended[name] = series.now()
        if scheduler:
            scheduler.ended(name)

    thread = threading.Thread(target=wait, name=name, daemon=True)
    thread.start()
    return thread


def name_of(policy: Policy, job: PlannedJob) -> str:
    return f"{policy.name}-{job.name}"


def flags_of(policy: Policy, job: PlannedJob, lab: Lab, setting: Setting) -> list[str]:
    kind, seconds = job.kind, BATCH * setting.options.seconds_per_sample
    step = (kind.serial * seconds, (1 - kind.serial) * seconds / BATCH, kind.network * seconds, kind.growth * seconds)
    given = {
        "model_zoo": setting.options.repository,
        "model_def": MODEL,
        "training_data": str(BATCH * job.steps),
        "num_epochs": 1,
        "global_batch_size": BATCH,
        "worker_resource_request": "cpu=0.1,memory=1Gi,gpu=1",
        "heartbeat_timeout": HEARTBEAT_SECONDS,
        "envs": f"{VARIABLE}={';'.join(f'{value:g}' for value in step)},OMP_NUM_THREADS=1",
    }
    flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    return [*flags, *policy.flags(lab, setting.gpus)]


def collect(
    policy: Policy,
    job: PlannedJob,
    submitted: dict[str, float],
    ended: dict[str, float],
    lab: Lab,
    artefacts: Artefacts,
    epoch: float,
) -> Completed:
    """Raises:
    Failed: the job has not succeeded.
    """
    name = name_of(policy, job)
    journal = lab.journal(name)
    artefacts.journal(f"events-{name}", journal)
    ends = [entry for entry in journal if entry["event"] == "job_finished"]
    if not ends or ends[-1]["phase"] != "succeeded" or ends[-1]["steps"] != job.steps:
        keep_traces([name], lab, artefacts)
        said = (
            f"{ends[-1]['phase']} after {ends[-1]['steps']} steps: {ends[-1]['reason']}" if ends else "without an end"
        )
        raise Failed(f"job {name} was to make {job.steps} steps, and is {said}")
    worlds = sum(entry["event"] == "world_formed" for entry in journal)
    return Completed(job, submitted[name], ends[-1]["time"] - epoch, worlds)


def keep_traces(names: Sequence[str], lab: Lab, artefacts: Artefacts) -> None:
    """Of jobs that did not do as they should; they go with the lab."""
    for name in names:
        try:
            artefacts.path(f"{name}.log").write_text("\n".join(lab.logs(name)))
            artefacts.journal(f"events-{name}", lab.journal(name))
        except Failed as error:
            print(f"warning: {error}", file=sys.stderr)


def chart(outcomes: dict[str, Outcome], setting: Setting) -> Chart:
    panels = []
    for policy in setting.policies:
        outcome = outcomes[policy.name]
        named = [Change(each.time, each.owner.removeprefix(f"{policy.name}-"), each.gpus) for each in outcome.changes]
        end = max(job.ended for job in outcome.jobs)
        panels.append(Panel(policy.title, named, end, {"all done": end}))
    return Chart(panels, {job.name: job.name for job in setting.jobs}, setting.gpus)


if __name__ == "__main__":
    sys.exit(main())
