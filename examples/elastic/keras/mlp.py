"""An MLP on handwritten digits: `elasticdl run --num_workers 1-4 -- python examples/elastic/keras/mlp.py`."""

import argparse

import keras
from sklearn.datasets import load_digits

import elasticdl.elastic.keras

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--global_batch_size", type=int, default=256)
parser.add_argument("--max_gpu_batch_size", type=int, default=64, help="most samples that fit a GPU's memory")
options = parser.parse_args()

elasticdl.elastic.keras.init(options.global_batch_size, options.max_gpu_batch_size)
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
model = elasticdl.elastic.keras.models.Model(model)
model.compile(keras.optimizers.RMSprop(), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(images, labels, epochs=options.epochs, validation_split=0.1, verbose=2)
