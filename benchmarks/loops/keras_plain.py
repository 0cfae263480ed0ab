"""The loops on Keras that `benchmarks.throughput` compares with: `fit` as it is, and Horovod with no elasticity."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.keras_models import make_arrays, make_loss, make_model, make_optimizer, use_one_thread
from benchmarks.loops.keras_meter import BatchMeter
from benchmarks.loops.meter import Meter
from benchmarks.loops.options import parse_measured
from benchmarks.models import WORKER_BATCH
from elasticdl.tensorflow import tf

Gradients = Sequence[tf.Tensor]


def fit(args: argparse.Namespace, *, jit_compile: bool | str) -> None:
    model = make_model(args.model)
    model.compile(make_optimizer(), make_loss(), jit_compile=jit_compile)
    meter = Meter(args.warm_up, args.seconds, agree=lambda number: number)
    inputs, labels = make_arrays(args.model, args.samples)
    model.fit(inputs, labels, WORKER_BATCH, epochs=10**9, verbose=0, callbacks=[BatchMeter(meter)])
    meter.write(args.folder, 0)


def horovod(args: argparse.Namespace) -> None:
    """As Horovod documents it: the tape's gradients, a tensor at a time."""
    import horovod.tensorflow as hvd

    _horovod(args, lambda gradients: [hvd.allreduce(gradient, op=hvd.Average) for gradient in gradients])


def horovod_grouped(args: argparse.Namespace) -> None:
    """All gradients in one group."""
    import horovod.tensorflow as hvd

    _horovod(args, functools.partial(hvd.grouped_allreduce, op=hvd.Average))


def _horovod(args: argparse.Namespace, average: Callable[[Gradients], Gradients]) -> None:
    import horovod.tensorflow as hvd

    hvd.init()
    model, optimizer, loss = make_model(args.model), make_optimizer(), make_loss()
    optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def make_step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(labels, model(inputs, training=True))
        optimizer.apply(average(tape.gradient(value, model.trainable_variables)), model.trainable_variables)
        return value

    def agree(number: int) -> int:
        return int(hvd.broadcast(tf.constant(number), 0, name="steps"))

    # Of Keras's own variables Horovod makes tensors.
    hvd.broadcast_variables([each.value for each in (*model.variables, *optimizer.variables)], root_rank=0)
    meter = Meter(args.warm_up, args.seconds, agree)
    meter.begin()
    for inputs, labels in batches(args, hvd.rank(), hvd.size()):
        meter.lap("load")
        make_step(inputs, labels)
        meter.lap("step")
        if meter.done():
            break
    meter.write(args.folder, hvd.rank())


def batches(args: argparse.Namespace, rank: int, size: int) -> tf.data.Dataset:
    """This rank's share of the samples in random order, without an end."""
    samples = tf.data.Dataset.from_tensor_slices(make_arrays(args.model, args.samples)).shard(size, rank)
    shuffled = samples.shuffle(args.samples // size).repeat()
    return shuffled.batch(WORKER_BATCH, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


LOOPS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "fit": functools.partial(fit, jit_compile="auto"),
    "fit-xla": functools.partial(fit, jit_compile=True),
    "horovod": horovod,
    "horovod-grouped": horovod_grouped,
}


def main() -> None:
    args = parse_measured(LOOPS)
    use_one_thread()
    LOOPS[args.loop](args)


if __name__ == "__main__":
    main()
