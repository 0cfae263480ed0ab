"""TensorFlow and Keras for this package, kept quiet: ``from elasticdl.tensorflow import keras, tf``.

Nothing else in the package imports them; `elasticdl.triton_first` says why. What the user has set in the environment
stays as it is.
"""

import os

from elasticdl.triton_first import import_triton

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import_triton()

import keras
import tensorflow as tf

__all__ = ["keras", "tf"]
