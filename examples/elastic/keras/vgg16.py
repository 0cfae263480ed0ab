"""VGG16 on generated images: `elasticdl run --num_workers 1-4 -- python examples/elastic/keras/vgg16.py`."""

import argparse

import keras
import numpy as np

import elasticdl.elastic.keras

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--global_batch_size", type=int, default=256)
parser.add_argument("--max_gpu_batch_size", type=int, default=64, help="most samples that fit a GPU's memory")
parser.add_argument("--samples", type=int, default=1024)
options = parser.parse_args()

elasticdl.elastic.keras.init(options.global_batch_size, options.max_gpu_batch_size)
images = np.random.default_rng(0).random((options.samples, 32, 32, 3), np.float32)  # in the place of CIFAR-10
labels = (images.mean(axis=(1, 2)) * 10).sum(axis=1).astype(int) % 10
model = keras.applications.VGG16(weights=None, input_shape=(32, 32, 3), classes=10)
model = elasticdl.elastic.keras.models.Model(model)
model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(images, labels, epochs=options.epochs, validation_split=0.1, verbose=2)
