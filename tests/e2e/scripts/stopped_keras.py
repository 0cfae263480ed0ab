"""Keras's own fit, with callbacks that count, as in `stopped.py`."""

import os
import time

import keras
import numpy as np

import elasticdl.elastic.keras as elastic

SLOW = os.environ.get("TEST_SLOW_WHILE", "")
elastic.init(8, 8)
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(160, 4)).astype("float32")
inputs = keras.Input((4,))
model = elastic.models.Model(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
model.compile(keras.optimizers.Adam(0.01), "mse")


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if SLOW and os.path.exists(SLOW):
            time.sleep(0.1)


plateau = keras.callbacks.ReduceLROnPlateau("loss", min_delta=1e9, patience=2, factor=0.5)
history = model.fit(x, x.sum(1, keepdims=True), epochs=6, verbose=0, callbacks=[Slow(), plateau])
if elastic.rank() == 0:
    told = {name: [round(value, 4) for value in values] for name, values in history.history.items()}
    print("final", told, [round(float(value), 4) for each in model.get_weights() for value in each.ravel()])
