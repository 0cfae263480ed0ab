"""The one place where TensorFlow is told about the devices of a worker."""

from __future__ import annotations

import contextlib

import tensorflow as tf


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
