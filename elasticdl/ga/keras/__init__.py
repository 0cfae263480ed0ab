"""Gradient accumulation for Keras on TensorFlow; see `optimizers`, and `callbacks` for ``fit``."""

from elasticdl.ga.keras import callbacks, optimizers

__all__ = ["callbacks", "optimizers"]
