"""TensorFlow as Keras's backend, and its devices."""

from __future__ import annotations

import contextlib

from elasticdl.common.errors import UserError
from elasticdl.elastic.training.seeds import SEED, used_streams_kept
from elasticdl.tensorflow import keras, tf


def require_backend() -> None:
    """Raises UserError if Keras computes on something else than TensorFlow."""
    if keras.config.backend() != "tensorflow":
        raise UserError(
            f"Keras computes on {keras.config.backend()}; elasticdl needs TensorFlow there: set KERAS_BACKEND=tensorflow"
        )


def seed_keras(seed: int) -> None:
    """All generators from which initial weights are drawn; unless the script has done so, as by ``keras.utils.set_random_seed``."""
    if tf.compat.v1.get_seed(0)[0] in (None, SEED):
        with used_streams_kept():
            keras.utils.set_random_seed(seed % 2**32)  # NumPy's global generator takes no more


def prepare_devices() -> None:
    """Take GPU memory as it is needed, not all of it at once; TensorFlow uses the GPU that the launcher made visible."""
    for gpu in tf.config.list_physical_devices("GPU"):
        # Refused for a device that has been used or divided: by a model that was built before, which has taken its
        # memory as TF_FORCE_GPU_ALLOW_GROWTH says (workers have it), or by the user's own wish.
        with contextlib.suppress(RuntimeError, ValueError):
            if not tf.config.experimental.get_memory_growth(gpu):
                tf.config.experimental.set_memory_growth(gpu, True)


def count_gpus() -> int:
    return len(tf.config.list_physical_devices("GPU"))
