"""What a user of Run:AI's library writes, with its new name: ``fit``, twice, and ``evaluate`` after each."""

import json
import os
import time

import keras
import numpy as np

import elasticdl.elastic.keras


class Report(keras.callbacks.Callback):
    """Each step's losses as Keras tells them, from every worker; a step of a fit takes longer while its file is there."""

    def __init__(self, name):
        super().__init__()
        self.name, self.epoch, self.count = name, 0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        show("step", {"step": [self.name, self.epoch, batch], "loss": logs["loss"], "accuracy": logs["accuracy"]})
        self.count += 1
        if self.name == "first" and os.path.exists(os.environ.get("TEST_FIRST_SLOW_WHILE", "")):
            time.sleep(0.7)
        if self.name == "second" and os.path.exists(os.environ.get("TEST_SLOW_WHILE", "")):
            time.sleep(min(0.7, 0.05 * 1.05**self.count))


elasticdl.elastic.keras.init(64, 16)
random = np.random.RandomState(0)
inputs = random.randn(300, 8).astype("float32")
labels = inputs[:, :3].argmax(1)
layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
model = elasticdl.elastic.keras.models.Model(keras.Sequential(layers))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
parts = 3  # of the 5 steps of a pass, an epoch of the second fit has two
epochs = int(os.environ["TEST_PASSES"]) * parts
given = {"validation_data": (inputs[:50], labels[:50]), "verbose": 0}


def show(title, value):
    print(title, json.dumps(value), flush=True)


show("history", model.fit(inputs, labels, epochs=3, callbacks=[Report("first")], **given).history)
show("between", model.evaluate(inputs, labels, verbose=0))
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])  # now with another optimizer
callbacks = [
    keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.8, patience=parts, min_delta=0.01, verbose=0),
    keras.callbacks.ModelCheckpoint(
        os.environ["TEST_CHECKPOINTS"] + "/{epoch}.weights.h5", save_weights_only=True, save_freq=20
    ),
    Report("second"),
]
given["steps_per_epoch"] = 2
show("history", model.fit(inputs, labels, epochs=epochs, callbacks=callbacks, **given).history)
show("evaluated", model.evaluate(inputs, labels, verbose=0))
show("master", elasticdl.elastic.master)
