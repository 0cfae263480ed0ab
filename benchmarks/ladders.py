"""The loops that `benchmarks.throughput` measures, in ladders: those of one ladder are measured against each other."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.job import ElasticJob, flags_of
from benchmarks.loops.records import REPLICA
from benchmarks.models import worker_batch
from benchmarks.peers.systems import TorchFt
from benchmarks.processes import Failed, Processes, free_port, scratch

SAMPLES = 8192
TIMEOUT = 120.0  # beyond the measured seconds: start, imports, warm-up
ELASTIC = "elastic"
# How processes that no master leads are started, so that they find each other.
HOROVODRUN = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "--network-interface", "lo", "-np"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


@dataclass(frozen=True, slots=True)
class Loop:
    """One of a program of `benchmarks.loops`; ``way``: elastic, with ``options`` of the job, or how else."""

    program: str
    name: str
    way: str = ELASTIC
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all loops of a ladder have in common; ``warm_up``: steps before the measured ``seconds``; ``samples``: of an epoch."""

    model: str
    workers: int
    warm_up: int
    seconds: float
    samples: int = SAMPLES


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one loop; times in milliseconds per step, mean over the ranks."""

    samples_per_second: float
    step_ms: float
    cpu_ms: float
    laps_ms: dict[str, float]
    kept: dict[str, float] = field(default_factory=dict)  # bytes, mean over the ranks


def measure(loop: Loop, setting: Setting) -> Sample:
    """Run one loop once."""
    with scratch() as processes, scratch() as others:
        given = {"record": "meter", "model": setting.model, "samples": setting.samples, "warm_up": setting.warm_up}
        given |= {"seconds": setting.seconds, "workers": setting.workers, "way": loop.way, "folder": processes.folder}
        program = ["-m", f"benchmarks.loops.{loop.program}", loop.name, *flags_of(given)]
        if loop.way == ELASTIC:
            each = int(loop.options.get("processes_per_worker", "1"))
            command, workers = [sys.executable, *program], str(setting.workers // each)
            ElasticJob("throughput", workers, command, loop.options, processes).start()
        elif loop.way == "torchft":
            start_torchft(program, setting.workers, processes, others)
        else:
            start = [sys.executable]
            if loop.way == "horovod":
                start = [*HOROVODRUN, str(setting.workers), sys.executable]
            elif setting.workers > 1:
                start = [*TORCHRUN, str(setting.workers)]
            processes.start(loop.name, [*start, *program], {"GLOO_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"})
        processes.wait_all(TIMEOUT + setting.seconds)
        return _read(processes.folder, setting)


def start_torchft(program: Sequence[str], workers: int, processes: Processes, others: Processes) -> None:
    """Two replica groups of half of the processes each; with ``others`` the lighthouse by which they find each other."""
    address = f"127.0.0.1:{free_port()}"
    others.start("lighthouse", [str(TorchFt.bin / "torchft_lighthouse"), "--min_replicas", "2", "--bind", address])
    for number in range(2):
        own = {"TORCHFT_LIGHTHOUSE": f"http://{address}", REPLICA: str(number), "GLOO_SOCKET_IFNAME": "lo"}
        command = [str(TorchFt.bin / "python"), *TORCHRUN[1:], str(workers // 2), *program]
        processes.start(f"replica-{number}", command, own)


def _read(folder: Path, setting: Setting) -> Sample:
    ranks: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    if len(ranks) != setting.workers:
        raise Failed(f"{len(ranks)} of {setting.workers} workers reported")
    step = statistics.fmean(rank["seconds"] / rank["steps"] for rank in ranks)
    laps = [rank["laps_ms"] for rank in ranks]
    return Sample(
        samples_per_second=setting.workers * worker_batch(setting.model) / step,
        step_ms=1e3 * step,
        cpu_ms=statistics.fmean(rank["cpu_ms_per_step"] for rank in ranks),
        laps_ms={name: statistics.fmean(each[name] for each in laps) for name in laps[0]},
        kept={name: statistics.fmean(rank["kept"][name] for rank in ranks) for name in ranks[0].get("kept", ())},
    )


@dataclass(frozen=True, slots=True)
class Ladder:
    """``references``: those that the others are compared with; ``main``: whether it is measured unless told. ``in_shards``: the model is."""

    title: str
    framework: str
    workers: int
    references: tuple[str, ...]
    loops: Mapping[str, Loop]
    main: bool = True
    in_shards: bool = False


TORCH, HOROVOD = {"collective": "torch"}, {"collective": "horovod"}
TRAINERS = {"loop": "plain", "lightning": "trainers", "transformers": "trainers"}  # and their programs


def _trainers(workers: int, reference: str) -> Ladder:
    theirs = {f"{name}-{reference}-{workers}": Loop(program, name, reference) for name, program in TRAINERS.items()}
    programs = {"library": "library", **TRAINERS}  # the library's loop beside the plain loop
    elastic = {f"{name}-elastic-{workers}": Loop(program, name, options=TORCH) for name, program in programs.items()}
    title = f"a plain loop and trainers, {'one worker' if workers == 1 else 'two workers'}"
    return Ladder(title, "torch", workers, tuple(theirs), elastic | theirs, main=False)


def _checks(name: str, framework: str, program: str, loop: str) -> Ladder:
    """What `--check_state epoch` costs, beside `off`."""
    ways = {f"{name}-checked": "epoch", f"{name}-unchecked": "off"}
    loops = {each: Loop(program, loop, options={**TORCH, "check_state": how}) for each, how in ways.items()}
    title = f"the workers compare their states, or do not: {name}, two workers"
    return Ladder(title, framework, 2, (f"{name}-unchecked",), loops, main=False)


def _in_shards() -> Ladder:
    """torchft where `benchmarks/peers/setup.sh` has been run."""
    loops = {
        "groups": Loop("plain", "loop", options={**TORCH, "processes_per_worker": "2"}),
        "fsdp": Loop("plain", "loop", "fsdp"),
        "hsdp": Loop("plain", "loop", "hsdp"),
    }
    if TorchFt().missing() is None:
        loops["torchft-hsdp"] = Loop("plain", "loop", "torchft")
    title = "a model in shards, two workers of two processes beside four processes"
    return Ladder(title, "torch", 4, ("hsdp", "fsdp"), loops, main=False, in_shards=True)


LADDERS = (
    Ladder(
        "PyTorch, two workers",
        "torch",
        workers=2,
        references=("horovod", "ddp"),
        loops={
            "elasticdl-torch": Loop("library", "library", options=TORCH),
            "elasticdl-horovod": Loop("library", "library", options=HOROVOD),
            "horovod": Loop("plain", "loop", "horovod"),
            "ddp": Loop("plain", "loop", "ddp"),
            "gloo-flat": Loop("plain", "loop", "gloo-flat"),
        },
    ),
    Ladder(
        "Keras, one worker",
        "keras",
        workers=1,
        references=("fit", "fit-xla"),
        loops={
            "keras-1": Loop("with_keras", "library"),
            "keras-1-fit": Loop("with_keras", "fit"),
            "keras-1-fit-xla": Loop("with_keras", "fit-xla"),
            "fit": Loop("with_keras", "fit", "alone"),
            "fit-xla": Loop("with_keras", "fit-xla", "alone"),
        },
    ),
    Ladder(
        "Keras, two workers",
        "keras",
        workers=2,
        references=("horovod-tf-grouped",),
        loops={
            "keras-2": Loop("with_keras", "library"),
            "keras-2-fit": Loop("with_keras", "fit"),
            "keras-2-torch": Loop("with_keras", "library", options=TORCH),
            "keras-2-fit-torch": Loop("with_keras", "fit", options=TORCH),
            "horovod-tf-grouped": Loop("with_keras", "horovod", "horovod"),
        },
    ),
    _in_shards(),
    _trainers(1, "alone"),
    _trainers(2, "ddp"),
    _checks("library", "torch", "library", "library"),
    *(_checks(name, "torch", program, name) for name, program in TRAINERS.items()),
    _checks("keras", "keras", "with_keras", "fit"),
)
LOOPS = tuple(name for ladder in LADDERS for name in ladder.loops)
MAIN_LOOPS = tuple(name for ladder in LADDERS if ladder.main for name in ladder.loops)
