"""The SavedModel that is served: the model zoo's ResNet20 with the weights that a seed gives.

What it says of an image is of no worth, untrained as it is; what it costs is that of any ResNet20.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

PIXELS = 3 * 32 * 32
Classify = Callable[[bytes], int]  # of one image, 32 x 32 x 3 bytes: its class


def ensure_exported(folder: Path, seed: int) -> None:
    """Export the model unless it is there. The folder appears whole; of several at once one makes it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            _export(scratch, seed)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _export(folder: Path, seed: int) -> None:
    from elasticdl.tensorflow import keras, tf
    from model_zoo.cifar10 import resnet20_keras

    keras.utils.set_random_seed(seed)
    model = resnet20_keras.custom_model()
    signature = [tf.TensorSpec((None, 32, 32, 3), tf.float32)]
    model.export(str(folder), format="tf_saved_model", input_signature=signature, verbose=False)


def load(folder: Path) -> Classify:
    """Ready for the first request: what is made at the first call is made here."""
    import numpy as np

    from elasticdl.tensorflow import tf
    from model_zoo.cifar10.recipe import DEVIATION, MEAN

    loaded: Any = tf.saved_model.load(str(folder))
    mean, deviation = np.array(MEAN, np.float32), np.array(DEVIATION, np.float32)

    def classify(image: bytes) -> int:
        pixels = np.frombuffer(image, np.uint8).reshape(1, 32, 32, 3).astype(np.float32)
        # The signature lives no longer than its model, which this function keeps.
        (scores,) = loaded.signatures["serving_default"](tf.constant((pixels - mean) / deviation)).values()
        return int(np.argmax(scores.numpy()[0]))

    classify(bytes(PIXELS))
    return classify
