"""The elasticdl loops on Keras that `benchmarks.throughput` measures: a loop of one's own, and `fit`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import elasticdl.elastic.keras as elastic
from benchmarks.keras_models import make_arrays, make_loss, make_model, make_optimizer, use_one_thread
from benchmarks.loops.check_timer import time_checks
from benchmarks.loops.keras_meter import BatchMeter
from benchmarks.loops.meter import Meter
from benchmarks.loops.options import parse_measured
from benchmarks.models import WORKER_BATCH
from elasticdl.data import Arrays
from elasticdl.elastic.keras.keras_state import KerasState


def loop(args: argparse.Namespace, meter: Meter) -> None:
    model = make_model(args.model)
    loader = elastic.DataLoader(Arrays(*make_arrays(args.model, args.samples)))
    state = elastic.KerasState(model=model, optimizer=make_optimizer(), loss=make_loss(), loader=loader)

    @elastic.run
    def train(state: KerasState) -> None:
        meter.begin()
        for _ in loader.epochs(10**9):
            for batch in loader:
                meter.lap("load")
                state.make_step(batch)
                meter.lap("step")
                state.commit()
                meter.lap("commit")
                if meter.done():
                    return

    train(state)


def fit(args: argparse.Namespace, meter: Meter, *, jit_compile: bool | str = "auto") -> None:
    model = elastic.models.Model(make_model(args.model))
    model.compile(make_optimizer(), make_loss(), jit_compile=jit_compile)
    inputs, labels = make_arrays(args.model, args.samples)
    model.fit(inputs, labels, epochs=10**9, verbose=0, callbacks=[BatchMeter(meter)])


LOOPS: dict[str, Callable[[argparse.Namespace, Meter], None]] = {
    "loop": loop,
    "fit": fit,
    "fit-xla": functools.partial(fit, jit_compile=True),
}


def agree(number: int) -> int:
    return int(elastic.context().collective.broadcast_bytes(str(number).encode(), "benchmark.steps"))


def main() -> None:
    args = parse_measured(LOOPS)
    use_one_thread()
    elastic.init(batch_size_per_worker=WORKER_BATCH)
    meter = Meter(args.warm_up, args.seconds, agree)
    time_checks(meter)
    LOOPS[args.loop](args, meter)
    meter.write(args.folder, elastic.rank())


if __name__ == "__main__":
    main()
