"""Loops on Keras with TensorFlow: elasticdl's library, `fit` plain and elastic, and Horovod with no elasticity."""

import time

BEGAN = time.time()

# ruff: noqa: E402
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.loops.records import Record, Team, Work, run, team_of_job
from benchmarks.models import CLASSES, LAYERS, WORKER_BATCH
from elasticdl.tensorflow import keras, tf

# One thread, which is asked for before TensorFlow computes anything.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)


def make_model(name: str) -> keras.Sequential:
    """Built, and always with the same initial weights."""
    keras.utils.set_random_seed(0)
    inputs, *hidden, outputs = LAYERS[name]
    layers = [keras.layers.Dense(units, "relu") for units in hidden]
    return keras.Sequential([keras.Input((inputs,)), *layers, keras.layers.Dense(outputs)])


def make_optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.01, momentum=0.9)


def make_loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_arrays(name: str, samples: int) -> tuple[Any, Any]:
    """Random inputs and labels in memory."""
    generator = np.random.default_rng(1)
    inputs = generator.standard_normal((samples, LAYERS[name][0]), np.float32)
    return inputs, generator.integers(0, CLASSES, samples)


def library(work: Work) -> None:
    """A loop of one's own."""
    import elasticdl.elastic.keras as elastic
    from elasticdl.data import Arrays
    from elasticdl.elastic.keras.keras_state import KerasState

    record = work.record
    elastic.init(batch_size_per_worker=WORKER_BATCH)
    model = make_model(work.model)
    loader = elastic.DataLoader(Arrays(*make_arrays(work.model, work.samples)))
    state = elastic.KerasState(model=model, optimizer=make_optimizer(), loss=make_loss(), loader=loader)
    record.watch_checks()

    @elastic.run
    def train(state: KerasState) -> None:
        record.begin(team_of_job(elastic.context))
        for _ in loader.epochs(10**9):
            for batch in loader:
                record.lap("load")
                state.make_step(batch)
                record.lap("step")
                record.traces(state.train_step.traces)
                record.made(state.step)
                state.commit()
                record.lap("commit")
                if record.over():
                    return

    train(state)


class Steps(keras.callbacks.Callback):  # type: ignore[misc]
    """A step ends where the next begins: a hook at its end would make Keras fetch the loss of each."""

    def __init__(self, record: Record, team: Team) -> None:
        super().__init__()
        # What a callback keeps in attributes is compared with the other workers', and would be measured along.
        self._is_over = functools.partial(_is_over, record, team)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._is_over():
            self.model.stop_training = True


def _is_over(record: Record, team: Team) -> bool:
    if record.team is None:
        record.begin(team)
        return False
    record.lap("step")
    return record.over()


def fit(work: Work, *, jit_compile: bool | str = "auto") -> None:
    """Of Keras itself, or elastic."""
    model, team = make_model(work.model), Team()
    batch: int | None = WORKER_BATCH
    if work.way == "elastic":
        import elasticdl.elastic.keras as elastic

        elastic.init(batch_size_per_worker=WORKER_BATCH)
        work.record.watch_checks()
        model, team, batch = elastic.models.Model(model), team_of_job(elastic.context), None
    model.compile(make_optimizer(), make_loss(), jit_compile=jit_compile)
    inputs, labels = make_arrays(work.model, work.samples)
    model.fit(inputs, labels, batch, epochs=10**9, verbose=0, callbacks=[Steps(work.record, team)])


def horovod(work: Work) -> None:
    """As Horovod documents it, with all of the tape's gradients in one group."""
    import horovod.tensorflow as hvd

    record = work.record
    hvd.init()
    model, optimizer, loss = make_model(work.model), make_optimizer(), make_loss()
    optimizer.build(model.trainable_variables)

    @tf.function  # type: ignore[untyped-decorator]
    def make_step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(labels, model(inputs, training=True))
        gradients = hvd.grouped_allreduce(tape.gradient(value, model.trainable_variables), op=hvd.Average)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    def agree(number: int) -> int:
        return int(hvd.broadcast(tf.constant(number), 0, name="steps"))

    # Of Keras's own variables Horovod makes tensors.
    hvd.broadcast_variables([each.value for each in (*model.variables, *optimizer.variables)], root_rank=0)
    samples = tf.data.Dataset.from_tensor_slices(make_arrays(work.model, work.samples)).shard(hvd.size(), hvd.rank())
    batches = samples.shuffle(work.samples // hvd.size()).repeat().batch(WORKER_BATCH, drop_remainder=True)
    record.begin(Team(agree, hvd.rank))
    for inputs, labels in batches.prefetch(tf.data.AUTOTUNE):
        record.lap("load")
        make_step(inputs, labels)
        record.lap("step")
        if record.over():
            break


LOOPS: dict[str, Callable[[Work], None]] = {
    "library": library,
    "fit": fit,
    "fit-xla": functools.partial(fit, jit_compile=True),
    "horovod": horovod,
}

if __name__ == "__main__":
    run(LOOPS, BEGAN)
