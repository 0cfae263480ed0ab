"""What a user of Run:AI's library writes: `fit`, once or again with another optimizer, and `evaluate`; else as `trained.py`.

trained_keras.py once | again FOLDER
"""

import sys
import time
from pathlib import Path

import keras
import numpy as np

import elasticdl.elastic.keras as elastic

again, folder = sys.argv[1] == "again", Path(sys.argv[2])


class Observer(keras.callbacks.Callback):
    def __init__(self, fit):
        super().__init__()
        self.fit, self.epoch = fit, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        step = int(self.model.optimizer.iterations)
        if elastic.rank() == 0:
            with (folder / "curve").open("a") as curve:
                curve.write(f"{self.fit}{step:04} {self.epoch} {batch} {logs['loss']:.6g} {logs['mae']:.6g}\n")
        if (folder / "slow").exists():
            time.sleep(min(2.0, 0.05 * 1.05**step))


elastic.init(8, 4)
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(160, 4)).astype("float32")
y = x.sum(1, keepdims=True)
inputs = keras.Input((4,))
model = elastic.models.Model(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
given, told = {"verbose": 0, "validation_data": (x[:50], y[:50])}, []
if again:
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=["mae"])
    told.append(model.fit(x, y, epochs=1, callbacks=[Observer(1)], **given).history)
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
plateau = keras.callbacks.ReduceLROnPlateau("loss", min_delta=1e9, patience=2, factor=0.5)
told.append(model.fit(x, y, epochs=12, steps_per_epoch=10, callbacks=[Observer(2), plateau], **given).history)
told.append(model.evaluate(x, y, verbose=0))
if elastic.rank() == 0:
    (folder / "end").write_text(f"{told} {[each.tolist() for each in model.get_weights()]}")
