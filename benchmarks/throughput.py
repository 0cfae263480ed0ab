"""Samples per second of elasticdl jobs, beside what the same machine does without elasticity: in one run, interleaved.

    python -m benchmarks.throughput [--seconds 10] [--rounds 5] [--models 1m,25m] [--loops elasticdl-torch,horovod,ddp]

With PyTorch against the plainest Horovod loop and torch DDP, two workers; with Keras against plain `fit` on one worker,
and plain Horovod on two. ``--loops all`` adds trainers beside what they do without elasticdl, what checks of the state cost, and a
model in shards on four processes: workers of two (groups) beside PyTorch's FSDP2, its HSDP, and torchft's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks.experiments.zoo.pace import VARIABLE as PACE
from benchmarks.harness import Parser, Results, Summary, add_out, busy_cores, names, show_table, summarise
from benchmarks.ladders import LADDERS, LOOPS, MAIN_LOOPS, SAMPLES, Ladder, Sample, Setting, measure
from benchmarks.models import LAYERS, TORCH_MODELS

KEPT = ("parameters", "gradients", "optimizer")
LAPS = ("load", "compute", "reduce", "update", "step", "commit", "check")


def main() -> int:
    args = parse()
    if args.pace:
        os.environ[PACE] = str(args.pace)
    results = Results("throughput", args.out)
    for ladder in LADDERS:
        if chosen := [name for name in args.loops if name in ladder.loops]:
            for model in args.models:
                if ladder.framework == "keras" and model not in LAYERS:
                    continue
                setting = Setting(model, ladder.workers, args.warm_up, args.seconds, args.samples)
                report(ladder, model, climb(ladder, chosen, setting, args.rounds, results), results)
    print(f"results: {results.path}")
    return 0


def parse() -> argparse.Namespace:
    parser = Parser("throughput", __doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="measured part of each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm_up", type=int, default=30, help="steps before the measured part")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of an epoch")
    parser.add_argument("--models", type=names, default=["1m", "25m"], help=",".join(TORCH_MODELS))
    parser.add_argument("--loops", type=names, default=list(MAIN_LOOPS), help=f"all, or some of {', '.join(LOOPS)}")
    parser.add_argument(
        "--pace", type=float, default=0.0, help="seconds a sample takes on a simulated GPU, which leaves the cores free"
    )
    add_out(parser)
    args = parser.parse_args()
    args.loops = list(LOOPS) if args.loops == ["all"] else args.loops
    parser.require_known(args, loops=LOOPS, models=TORCH_MODELS)
    return args


def climb(
    ladder: Ladder, chosen: Sequence[str], setting: Setting, rounds: int, results: Results
) -> dict[str, list[Sample]]:
    """All rounds of the chosen loops of one ladder."""
    runs: dict[str, list[Sample]] = {name: [] for name in chosen}
    for number in range(rounds):
        for name in chosen:
            before = busy_cores(0.5)
            sample = measure(ladder.loops[name], setting)
            runs[name].append(sample)
            fields = {**identity(ladder, setting.model, name), "round": number, "busy_cores_before": before}
            results.add("run", **fields, **asdict(sample))
            print(f"{setting.model} round {number + 1}: {name} {sample.samples_per_second:.0f} samples/s", flush=True)
    return runs


def identity(ladder: Ladder, model: str, name: str) -> dict[str, object]:
    return {
        "model": model,
        "loop": name,
        "framework": ladder.framework,
        "workers": ladder.workers,
        "pace": os.environ.get(PACE),
    }


def ratio(runs: Mapping[str, Sequence[Sample]], name: str, reference: str) -> Summary | None:
    """Of throughputs within the same round, so that slow drifts of the machine cancel; None without the reference."""
    if reference not in runs:
        return None
    pairs = zip(runs[name], runs[reference], strict=True)
    return summarise(one.samples_per_second / other.samples_per_second for one, other in pairs)


def report(ladder: Ladder, model: str, runs: Mapping[str, Sequence[Sample]], results: Results) -> None:
    rows, parts, memory = [], [], []
    shown_laps = [lap for lap in LAPS if any(lap in samples[0].laps_ms for samples in runs.values())]
    for name, samples in runs.items():
        rate = summarise(sample.samples_per_second for sample in samples)
        ratios = {reference: ratio(runs, name, reference) for reference in ladder.references}
        cpu = summarise(sample.cpu_ms for sample in samples)
        laps = {lap: statistics.median(sample.laps_ms[lap] for sample in samples) for lap in samples[0].laps_ms}
        step = statistics.median(sample.step_ms for sample in samples)
        numbers = {"rate": rate, "cpu_ms": cpu, "step_ms": step, "laps_ms": laps}
        if "check" in laps:
            numbers["check_share"] = summarise(sample.laps_ms["check"] / sample.step_ms for sample in samples)
        if samples[0].kept:
            numbers["kept"] = kept = {part: summarise(each.kept[part] for each in samples) for part in samples[0].kept}
            own = sum(kept[part].median for part in KEPT)
            memory.append(
                [name, *(f"{kept[part].median / 2**20:.2f}" for part in (*KEPT, "grown")), f"{own / 2**20:.2f}"]
            )
        over = {f"over_{reference}": value for reference, value in ratios.items()}
        results.add("summary", **identity(ladder, model, name), **numbers, **over)
        shown = [value.show(3) if value else "-" for value in ratios.values()]
        rows.append([name, rate.show(0), *shown, f"{step:.2f}", f"{cpu.median:.1f}"])
        commit = f"{100 * laps['commit'] / step:.2f} %" if "commit" in laps else "-"
        parts.append([name, *(f"{laps[lap]:.3f}" if lap in laps else "-" for lap in shown_laps), commit])
    columns = ["loop", "samples/s", *(f"of {name}" for name in ladder.references), "step ms", "CPU ms/step"]
    show_table(f"{model}: {ladder.title}, medians (range)", columns, rows)
    show_table(f"{model}: ms per step, mean", ["loop", *shown_laps, "commit of step"], parts)
    if memory and ladder.in_shards:
        show_table(
            f"{model}: MiB in each process, medians",
            ["loop", *KEPT, "private memory, growth", "sum of the first three"],
            memory,
        )


if __name__ == "__main__":
    sys.exit(main())
