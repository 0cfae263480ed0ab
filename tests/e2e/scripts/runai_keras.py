"""What a user of Run:AI's library writes, with its new name: plain ``fit``."""

import json
import os
import time

import keras
import numpy as np

import elasticdl.elastic.keras


class Report(keras.callbacks.Callback):
    """Each step's loss, from every worker; and slow while a file is there."""

    def on_train_batch_end(self, batch, logs=None):
        entry = {"batch": batch, "loss": logs["loss"], "accuracy": logs["accuracy"], "gpus": elasticdl.elastic.gpus}
        print("step", json.dumps({**entry, "steps": elasticdl.elastic.steps}), flush=True)
        if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
            time.sleep(0.4)


elasticdl.elastic.keras.init(64, 16)
random = np.random.RandomState(0)
inputs = random.randn(300, 8).astype("float32")
labels = inputs[:, :3].argmax(1)
layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
model = elasticdl.elastic.keras.models.Model(keras.Sequential(layers))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
epochs = int(os.environ["TEST_EPOCHS"])
history = model.fit(
    inputs, labels, epochs=epochs, callbacks=[Report()], validation_data=(inputs[:50], labels[:50]), verbose=0
)
print("history", json.dumps(history.history), flush=True)
