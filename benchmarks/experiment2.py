"""Serving and training share eight GPUs: training has those that serving does not need, and gives them up when it does.

    python -m benchmarks.experiment2 [--scale 1] [--seed 0] [--out DIR]
    python -m benchmarks.experiment2 --cluster kubeconfig --image IMAGE --volume ... --training_data ...

An inference service, a Deployment of high priority with one GPU a replica, is scaled by its request rate, which rises and falls
as in the published experiment. A training job of low priority has up to six workers. --help lists all options;
docs/experiments.md has the results. The image has TensorFlow, too, and with --cluster kubeconfig this has to run where
pods' addresses can be reached, such as in a pod: the load goes to the replicas directly.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from benchmarks.experiments.artefacts import Artefacts
from benchmarks.experiments.figures import Panel, draw_gpus
from benchmarks.experiments.lab import Lab, conducted
from benchmarks.experiments.options import NO_QUEUE, Options, make_parser, not_negative, positive, read, run
from benchmarks.experiments.pods import Fact, GpuSeries, PodTimes
from benchmarks.experiments.serving.demand import PUBLISHED as PUBLISHED_CURVE
from benchmarks.experiments.serving.demand import Autoscaler, LoadPlan, Rule, parse_curve
from benchmarks.experiments.serving.outcome import PUBLISHED, TARGETS, Seen, from_zero, measured
from benchmarks.experiments.serving.server import PORT
from benchmarks.experiments.serving.service import APP, Records, Service, deployed, save_logs
from benchmarks.experiments.training import HEARTBEAT_SECONDS, STEP_COLUMNS, Followed, Training, step_rows
from benchmarks.harness import flat, show_numbers, show_targets
from benchmarks.job import flags_of
from benchmarks.processes import Failed, Processes
from elasticdl.common.errors import UserError

SCALE = 1.0
SECONDS_PER_SAMPLE = 0.25
REQUEST_SECONDS = 0.1
GPUS, WORKERS = 8, 6
JOB = "training"
SIMULATED_BATCH, REAL_BATCH = 12, 768
STEPS_PER_EPOCH = 100  # of the stand-in for CIFAR-10
ENDLESS = 1_000_000  # it is stopped
START_SECONDS = 600.0
SETTLE_SECONDS = 120.0
# Of the load and of who looks at it, where the time is not compressed.
RAMP, EVERY, WINDOW, PATIENCE = 5.0, 5.0, 10.0, 3
SHORTEST_EVERY = 1.0
TABLES = ("pods.csv", "requests.csv", "rotation.csv", "steps.csv")
RESULTS = (*TABLES, "events.*", "scalings.jsonl", "gpus.*", "summary.json", "logs.log", "serving.log")
REAL = (
    "API server, scheduler, preemption, Deployment, pods, HTTP, master, rendezvous, Horovod's reductions, the arithmetic of "
    "both models, starting a replica and a worker"
)
SIMULATED = (
    "a sample takes a worker {pace:g} s and a request a replica {request:g} s, whatever their core needs: after the arithmetic "
    "they sleep; nvidia.com/gpu is what a node says it has; a container is a process. The load rises and falls {scale:g} "
    "times faster than published; starting and leaving is not faster"
)


@dataclass(frozen=True, slots=True)
class Setting:
    options: Options
    gpus: int
    plan: LoadPlan
    rule: Rule
    training: Training
    request_seconds: float  # of a simulated GPU; 0: real ones

    @property
    def replicas(self) -> int:
        """At the beginning."""
        return self.plan.curve.replicas[0]


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("experiment2", __doc__, SCALE, SECONDS_PER_SAMPLE)
    parser.add_argument("--gpus", type=int, default=GPUS, help=f"that serving and training share ({GPUS})")
    parser.add_argument("--curve", default=PUBLISHED_CURVE,
        help=f"SECONDS:REPLICAS,...,SECONDS: how many replicas the load needs from when on ({PUBLISHED_CURVE})")  # fmt: skip
    parser.add_argument("--requests_per_replica", type=positive, default=4.0, help="a second; what it is scaled by (4)")
    parser.add_argument("--request_seconds", type=not_negative, default=REQUEST_SECONDS,
        help=f"of a request on a simulated GPU ({REQUEST_SECONDS:g})")  # fmt: skip
    options = read(parser, argv)
    return run(parser, lambda: experiment(make_setting(options)))


def make_setting(options: Options) -> Setting:
    try:
        curve = parse_curve(options.curve, options.scale, RAMP)
    except ValueError as error:
        raise UserError(f"--curve {error}") from None
    if max(curve.replicas) >= options.gpus:
        raise UserError(
            f"--curve {options.curve}: {max(curve.replicas)} replicas of {options.gpus} --gpus leave none to train on"
        )
    every = max(EVERY / options.scale, SHORTEST_EVERY)
    plan = LoadPlan(curve, every, every * WINDOW / EVERY, options.seed)
    # The last GPU is training's, so that its state is always in somebody's memory.
    rule = Rule(options.requests_per_replica, 1, options.gpus - 1, PATIENCE)
    workers = options.gpus - curve.replicas[0]
    batch = SIMULATED_BATCH if options.simulated else REAL_BATCH
    training = Training(f"1-{workers}", ENDLESS, ENDLESS, batch, -(-batch // workers))
    seconds = options.request_seconds if options.simulated else 0.0
    options.queue = NO_QUEUE
    return Setting(options, options.gpus, plan, rule, training, seconds)


def experiment(setting: Setting) -> None:
    options = setting.options
    with conducted(options, setting.gpus, RESULTS, REAL, simulated(setting)) as (lab, artefacts):
        seen = observe(setting, lab, artefacts)
        numbers = measured(seen)
        given = {name: value for name, value in asdict(setting).items() if name != "options"}
        artefacts.summary({**numbers, "targets": TARGETS, "published": PUBLISHED, "setting": given})
        panel = Panel("", seen.changes, seen.end, {})
        owners = {JOB: "training", APP: "serving"}
        artefacts.figure("gpus", lambda path: draw_gpus(path, [panel], owners, seen.gpus))
        shown = {"ours": {**numbers, "lags": ()}, "published": PUBLISHED}
        show_numbers(f"Serving and training on {setting.gpus} GPUs", shown)
        show_targets(flat(numbers), TARGETS)


def simulated(setting: Setting) -> str:
    if not setting.options.simulated:
        return "nothing"
    pace, scale = setting.options.seconds_per_sample, setting.options.scale
    return SIMULATED.format(pace=pace, request=setting.request_seconds, scale=scale)


def observe(setting: Setting, lab: Lab, artefacts: Artefacts) -> Seen:
    """Both from their start, and what happens while the load lasts."""
    with ExitStack() as stack:
        processes = stack.enter_context(Processes(artefacts.folder))
        records = Records()
        history = stack.enter_context(PodTimes(lab.core, lab.namespace))
        service = stack.enter_context(Service(lab.core, lab.namespace, APP, PORT, records))
        scale = stack.enter_context(deployed(lab, setting.replicas, setting.request_seconds))
        try:
            followed = begin(setting, lab, processes)
            service.wait_for_replicas(setting.replicas, START_SECONDS, followed.raise_if_over)
            workers = setting.gpus - setting.replicas
            followed.wait(lambda: world_size(followed) == workers, f"a world of {workers} workers", START_SECONDS)
            print("all replicas serve, all workers train: the load begins", flush=True)
            with GpuSeries(lab.core, lab.namespace, artefacts.folder / "gpus.csv") as series:
                records.clock = series.now
                autoscaler = Autoscaler(setting.rule, setting.replicas)
                service.play(setting.plan, autoscaler, scale, followed.raise_if_over)
                replicas = [setting.replicas, *(each.replicas for each in records.scalings)]
                settle(followed, setting.gpus - replicas[-1])
            followed.stop()
        except Failed:
            save_logs(lab, artefacts.folder / "serving.log")
            raise
        finally:
            artefacts.table("pods", ("pod", *Fact), history.rows())
            records.write(artefacts)
        artefacts.journal("events", followed.journal.read())
    steps = [replace(step, time=step.time - series.epoch) for step in followed.steps()]
    artefacts.table("steps", STEP_COLUMNS, step_rows(JOB, steps))
    pods = {name: {fact: at - series.epoch for fact, at in times.items()} for name, times in history.all().items()}
    return Seen(
        end=setting.plan.curve.end,
        gpus=setting.gpus,
        changes=from_zero([change for change in series.changes if change.owner in (APP, JOB)]),
        rotations=records.rotations,
        requests=records.requests,
        pods=pods,
        journal=[{**entry, "time": entry["time"] - series.epoch} for entry in followed.journal.read()],
        steps=steps,
        serving=APP,
        training=JOB,
    )


def begin(setting: Setting, lab: Lab, processes: Processes) -> Followed:
    """The training job; returns when it is submitted."""
    data = lab.training_data(STEPS_PER_EPOCH * setting.training.global_batch)
    flags = setting.training.flags(setting.options, data)
    if setting.options.simulated:
        flags += flags_of({"heartbeat_timeout": HEARTBEAT_SECONDS})
    lab.submit(JOB, flags)
    followed = Followed(lab, JOB, processes)
    followed.follow_logs()
    return followed


def world_size(followed: Followed) -> int:
    """Of the newest."""
    return max((len(entry["members"]) for entry in followed.journal.of("world_formed")[-1:]), default=0)


def settle(followed: Followed, workers: int) -> None:
    """Let the last GPU that was freed come to its first step, which is measured, too."""
    try:
        made = f"steps of {workers} workers"
        followed.wait(lambda: [step.workers for step in followed.steps()[-1:]] == [workers], made, SETTLE_SECONDS)
    except Failed as error:
        followed.raise_if_over()
        print(f"warning: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
