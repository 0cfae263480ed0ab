"""TensorFlow as Keras's backend, kept quiet; imported before either of them.

What the user has set in the environment stays as it is.
"""

from __future__ import annotations

import os

from elasticdl.common.errors import UserError

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def require_backend() -> None:
    """Raises:
    UserError: Keras computes on something else than TensorFlow, or is too old.
    """
    import keras

    if keras.config.backend() != "tensorflow":
        raise UserError(
            f"Keras computes on {keras.config.backend()}; elasticdl needs TensorFlow there: set KERAS_BACKEND=tensorflow"
        )


def seed_keras(seed: int) -> None:
    """All generators from which initial weights are drawn."""
    import keras

    keras.utils.set_random_seed(seed % 2**32)  # NumPy's global generator takes no more
