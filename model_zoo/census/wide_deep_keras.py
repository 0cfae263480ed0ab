"""Wide and deep (Cheng et al. 2016) for a table: a weight for each category, and a network over their embeddings.

    python model_zoo/census/generate.py --out data
    elasticdl train --model_zoo model_zoo --model_def census.wide_deep_keras --num_workers 2-4 \
        --global_batch_size 256 --num_epochs 10 --training_data data/train.csv --validation_data data/test.csv

The records come through `feed`, as in ElasticDL's modules: each is the fields of one line, as texts. Categories are
hashed, so that none has to be known before.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from elasticdl import Mode

NUMBERS = {
    "age": (38.6, 13.6),
    "education_num": (10.1, 2.6),
    "capital_gain": (1000.0, 7000.0),
    "hours_per_week": (40.0, 12.0),
}
CATEGORIES = {"workclass": 16, "education": 32, "marital_status": 16, "occupation": 32, "sex": 4, "native_country": 64}
INCOME = "income"
ABOVE = ">50K"


def custom_model(embedding: int = 8, hidden: int = 32) -> keras.Model:
    numbers = keras.Input((len(NUMBERS),), name="numbers")
    categories = {name: keras.Input((), dtype="int32", name=name) for name in CATEGORIES}
    wide = [layers.Embedding(size, 1)(categories[name]) for name, size in CATEGORIES.items()]
    deep = [layers.Embedding(size, embedding)(categories[name]) for name, size in CATEGORIES.items()]
    features = layers.Concatenate()([numbers, *deep])
    features = layers.Dense(hidden, activation="relu")(features)
    features = layers.Dense(hidden, activation="relu")(features)
    logits = layers.Add()([layers.Dense(1)(features), layers.Dense(1)(numbers), *wide])
    return keras.Model({"numbers": numbers, **categories}, logits, name="wide_deep")


def loss(labels: Any, predictions: Any) -> Any:
    return keras.ops.mean(keras.losses.binary_crossentropy(labels, predictions, from_logits=True))


def optimizer(lr: float = 0.003) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(lr)


def feed(dataset: tf.data.Dataset, mode: str, metadata: Any) -> tf.data.Dataset:
    """Numbers scaled and categories hashed, a batch at a time, which is far faster than line by line."""
    place = {name: number for number, name in enumerate(metadata.column_names)}

    def convert(lines: tf.Tensor) -> dict[str, tf.Tensor] | tuple[dict[str, tf.Tensor], tf.Tensor]:
        hashed = {
            name: tf.strings.to_hash_bucket_fast(lines[:, place[name]], size) for name, size in CATEGORIES.items()
        }
        features = {name: tf.cast(buckets, tf.int32) for name, buckets in hashed.items()}
        scaled = [
            (tf.strings.to_number(lines[:, place[name]]) - mean) / scale for name, (mean, scale) in NUMBERS.items()
        ]
        inputs = {"numbers": tf.stack(scaled, axis=1), **features}
        if mode == Mode.PREDICTION:  # the files may have no labels
            return inputs
        return inputs, tf.cast(lines[:, place[INCOME]] == ABOVE, tf.float32)[:, None]

    return dataset.batch(1024).map(convert).unbatch()


def eval_metrics_fn() -> dict[str, Any]:
    return {
        "accuracy": lambda labels, outputs: keras.ops.mean((outputs > 0) == (labels > 0.5)),
        "auc": keras.metrics.AUC(from_logits=True),
    }
