"""What a user of Run:AI's library writes, with its new name: plain ``fit``, and ``evaluate`` after it."""

import json
import os
import time

import keras
import numpy as np

import elasticdl.elastic.keras


class Report(keras.callbacks.Callback):
    """Each step's losses as Keras tells them, from every worker; and slow while a file is there."""

    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        entry = {"epoch": self.epoch, "batch": batch, "loss": logs["loss"], "accuracy": logs["accuracy"]}
        print("step", json.dumps({**entry, "gpus": elasticdl.elastic.gpus}), flush=True)
        if os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
            time.sleep(0.3)


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
print("evaluated", json.dumps(model.evaluate(inputs, labels, verbose=0)), flush=True)
print("master", json.dumps(elasticdl.elastic.master), flush=True)
