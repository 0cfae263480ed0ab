"""VGG16 on generated images, with accumulated gradients. No cluster is needed."""

import argparse

import keras
import numpy as np

import elasticdl.ga.keras

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--steps", type=int, default=4, help="micro-batches per optimizer step")
parser.add_argument("--batch_size", type=int, default=64, help="samples of a micro-batch")
parser.add_argument("--samples", type=int, default=1024)
options = parser.parse_args()

images = np.random.default_rng(0).random((options.samples, 32, 32, 3), np.float32)  # in the place of CIFAR-10
labels = (images.mean(axis=(1, 2)) * 10).sum(axis=1).astype(int) % 10
model = keras.applications.VGG16(weights=None, input_shape=(32, 32, 3), classes=10)
optimizer = elasticdl.ga.keras.optimizers.SGD(options.steps, 0.01, momentum=0.9)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [elasticdl.ga.keras.callbacks.ExactEpochs()]
model.fit(images, labels, options.batch_size, options.epochs, verbose=2, callbacks=callbacks, validation_split=0.1)
