"""Elastic training on Horovod: the model you get does not depend on the cluster you got.

The packages, from the leaf up: ``common`` and ``proto`` (shared by all), ``elastic`` (the library that a
training script imports), ``worker`` (runs a model-zoo module on that library), ``master`` (one per job,
decides who trains), ``cli`` (the ``elasticdl`` command). The master and the workers meet only in ``proto``.
"""

from enum import StrEnum

__all__ = ["Mode"]
__version__ = "0.1.0"


class Mode(StrEnum):
    """What data is read for: the first argument of ``dataset`` and the second of ``feed``; equal to its text."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"
