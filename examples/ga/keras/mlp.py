"""An MLP on handwritten digits, with accumulated gradients. No cluster is needed."""

import argparse

import keras
from sklearn.datasets import load_digits

import elasticdl.ga.keras

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--steps", type=int, default=4, help="micro-batches per optimizer step")
parser.add_argument("--batch_size", type=int, default=64, help="samples of a micro-batch")
options = parser.parse_args()

digits = load_digits()
images, labels = digits.data.astype("float32") / 16, digits.target
model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(512, "relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(512, "relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10, "softmax"),
    ]
)
optimizer = elasticdl.ga.keras.optimizers.RMSprop(steps=options.steps)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [elasticdl.ga.keras.callbacks.ExactEpochs()]
model.fit(images, labels, options.batch_size, options.epochs, verbose=2, callbacks=callbacks, validation_split=0.1)
