"""A CNN on handwritten digits: batches of 256, of which 64 at a time go through the model. No cluster is needed."""

import argparse

import keras
from sklearn.datasets import load_digits

import elasticdl.ga.keras

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--steps", type=int, default=4, help="micro-batches per optimizer step")
options = parser.parse_args()

keras.utils.set_random_seed(0)
digits = load_digits()
images, labels = digits.images[..., None].astype("float32") / 16, digits.target
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(10),
    ]
)
optimizer = elasticdl.ga.keras.optimizers.Adam(options.steps, learning_rate=0.01)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])


def report(epoch, logs):
    print(f"epoch {epoch}: accuracy {logs['val_accuracy']:.1%}")


# The last micro-batch of an epoch is smaller, and so is the last batch.
callbacks = [elasticdl.ga.keras.callbacks.ExactEpochs(), keras.callbacks.LambdaCallback(on_epoch_end=report)]
test = (images[1500:], labels[1500:])
model.fit(images[:1500], labels[:1500], 64, options.epochs, verbose=0, callbacks=callbacks, validation_data=test)
