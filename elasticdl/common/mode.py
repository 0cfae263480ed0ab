"""What data is read for."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """The first argument of ``dataset`` and the second of ``feed``; equal to its text."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"
