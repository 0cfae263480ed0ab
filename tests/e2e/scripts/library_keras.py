"""A loop of one's own on Keras that goes on until the file ``argv[1]`` is there, and tells how it went in ``argv[2]``."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import elasticdl.elastic.keras as elastic
from elasticdl.data import Arrays

import keras  # isort: skip

END, REPORTS = map(Path, sys.argv[1:])
elastic.init(global_batch_size=30, max_gpu_batch_size=8)
generator = np.random.default_rng(0)
inputs = generator.normal(size=(100, 8)).astype("float32")
labels = (inputs.sum(1) > 0).astype("int64")
model = keras.Sequential(
    [keras.layers.Dense(16), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1), keras.layers.Dense(2)]
)
state = elastic.KerasState(
    model=model,
    optimizer=keras.optimizers.Adam(0.01),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    loader=elastic.DataLoader(Arrays(inputs, labels)),
    losses=[],
)


@elastic.run
def train(state):
    for _ in state.loader.epochs(10**6):
        for batch in state.loader:
            state.losses.append(state.make_step(batch))
            state.commit()
            time.sleep(0.01)
        if int(elastic.context().collective.sum(np.int64([END.exists()]), "end")[0]):
            return


train(state)
report = {
    "step": state.step,
    "losses": state.losses,
    "traces": state.train_step.traces,
    "weights": [float(np.sum(weights)) for weights in model.get_weights()],
}
(REPORTS / f"{os.getpid()}.json").write_text(json.dumps(report))
