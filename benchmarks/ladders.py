"""The loops that `benchmarks.throughput` measures, in ladders: those of one ladder are measured against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Loop:
    """A program of `benchmarks.loops`; ``name``: which of the loops in it, if it has several."""

    program: str
    name: str | None = None
    elastic: bool = False
    horovod: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)  # of an elastic job


@dataclass(frozen=True, slots=True)
class Ladder:
    """``references``: those that the others are compared with; ``main``: those that are measured unless told."""

    title: str
    framework: str
    workers: int
    references: tuple[str, ...]
    main: tuple[str, ...]
    loops: Mapping[str, Loop]


def _horovod(name: str, env: Mapping[str, str] | None = None) -> Loop:
    return Loop("plain", name, horovod=True, env=env or {})


def _elastic(collective: str, name: str = "elastic") -> Loop:
    return Loop("elastic", name, elastic=True, options={"collective": collective})


PYTORCH = Ladder(
    "PyTorch, two workers",
    "torch",
    workers=2,
    references=("horovod", "ddp"),
    main=("elasticdl-torch", "elasticdl-horovod", "horovod", "ddp"),
    loops={
        "elasticdl-torch": _elastic("torch"),
        "elasticdl-horovod": _elastic("horovod"),
        **{  # to choose the size of a bucket
            f"elasticdl-{engine}-{size}mb": _elastic(engine, f"elastic-{size}mb")
            for engine in ("torch", "horovod")
            for size in (1, 16, 64)
        },
        "horovod": _horovod("horovod"),
        "ddp": Loop("plain", "ddp"),
        "horovod-grouped": _horovod("horovod-grouped"),
        "horovod-flat": _horovod("horovod-flat"),
        "horovod-flat-sleep": _horovod("horovod-flat-sleep"),
        "horovod-buckets": _horovod("horovod-buckets"),
        # Only to see what waiting for the background thread costs: an elastic job can't set it.
        "horovod-flat-0.1ms": _horovod("horovod-flat-sleep", {"HOROVOD_CYCLE_TIME": "0.1"}),
        "gloo-flat": Loop("plain", "gloo-flat"),
        "alone": Loop("plain", "alone"),
    },
)
KERAS_ALONE = Ladder(
    "Keras, one worker",
    "keras",
    workers=1,
    references=("fit", "fit-xla"),
    main=("keras-1", "keras-1-fit", "keras-1-fit-xla", "fit", "fit-xla"),
    loops={
        "keras-1": Loop("keras_elastic", "loop", elastic=True),
        "keras-1-fit": Loop("keras_elastic", "fit", elastic=True),
        "keras-1-fit-xla": Loop("keras_elastic", "fit-xla", elastic=True),
        "fit": Loop("keras_plain", "fit"),
        "fit-xla": Loop("keras_plain", "fit-xla"),
    },
)
KERAS = Ladder(
    "Keras, two workers",
    "keras",
    workers=2,
    references=("horovod-tf", "horovod-tf-grouped"),
    main=("keras-2", "keras-2-fit", "keras-2-torch", "keras-2-fit-torch", "horovod-tf", "horovod-tf-grouped"),
    loops={
        "keras-2": Loop("keras_elastic", "loop", elastic=True),
        "keras-2-fit": Loop("keras_elastic", "fit", elastic=True),
        "keras-2-torch": Loop("keras_elastic", "loop", elastic=True, options={"collective": "torch"}),
        "keras-2-fit-torch": Loop("keras_elastic", "fit", elastic=True, options={"collective": "torch"}),
        "horovod-tf": Loop("keras_plain", "horovod", horovod=True),
        "horovod-tf-grouped": Loop("keras_plain", "horovod-grouped", horovod=True),
    },
)
TRAINERS = ("loop", "lightning", "transformers")


def _trainers(workers: int, reference: str) -> Ladder:
    elastic = {f"{name}-elastic-{workers}": name for name in TRAINERS}
    theirs = {f"{name}-{reference}-{workers}": name for name in TRAINERS}
    return Ladder(
        f"a plain loop and trainers, {'one worker' if workers == 1 else 'two workers'}",
        "torch",
        workers,
        references=tuple(theirs),
        main=(),
        loops={
            **{
                name: Loop("trainers_measured", name, elastic=True, options={"collective": "torch"}) for name in elastic
            },
            **{name: Loop("trainers_measured", name) for name in theirs},
        },
    )


def _checks(name: str, framework: str, program: str, loop: str) -> Ladder:
    """What `--check_state epoch` costs, beside `off`."""
    ways = {f"{name}-checked": "epoch", f"{name}-unchecked": "off"}
    return Ladder(
        f"the workers compare their states, or do not: {name}, two workers",
        framework,
        workers=2,
        references=(f"{name}-unchecked",),
        main=(),
        loops={
            each: Loop(program, loop, elastic=True, options={"collective": "torch", "check_state": how})
            for each, how in ways.items()
        },
    )


CHECKS = (
    _checks("library", "torch", "elastic", "elastic"),
    *(_checks(name, "torch", "trainers_measured", f"{name}-elastic-2") for name in TRAINERS),
    _checks("keras", "keras", "keras_elastic", "fit"),
)
LADDERS = (PYTORCH, KERAS_ALONE, KERAS, _trainers(1, "alone"), _trainers(2, "ddp"), *CHECKS)
LOOPS = tuple(name for ladder in LADDERS for name in ladder.loops)
MAIN_LOOPS = tuple(name for ladder in LADDERS for name in ladder.main)
