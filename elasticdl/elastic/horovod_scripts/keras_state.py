"""Horovod's ``TensorFlowKerasState`` with an optimizer of Keras 3."""

from __future__ import annotations

from typing import Any


def mend_keras_state(state_class: Any) -> None:
    """INTERFACE"""
