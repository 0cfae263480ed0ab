"""The Keras loop that `benchmarks.start` starts: says when it began and when it had made its first step."""

import time

BEGAN = time.time()

# ruff: noqa: E402

import numpy as np

import elasticdl.elastic.keras as elastic
from benchmarks.loops.startlog import rest, write_start
from elasticdl.data import Arrays
from elasticdl.elastic.keras.keras_state import KerasState
from elasticdl.tensorflow import keras


def main() -> None:
    elastic.init(global_batch_size=64)
    layers = keras.layers
    model = keras.Sequential([keras.Input((784,)), layers.Dense(512, activation="relu"), layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loader = elastic.DataLoader(Arrays(np.random.rand(1024, 784).astype("float32"), np.random.randint(0, 10, 1024)))

    @elastic.run
    def train(state: KerasState) -> None:
        for _ in loader.epochs(10**9):
            for batch in loader:
                state.make_step(batch)
                write_start(BEGAN)
                state.commit()
                rest()

    train(elastic.KerasState(model=model, optimizer=keras.optimizers.Adam(), loss=loss, loader=loader))


if __name__ == "__main__":
    main()
