"""The base of ``PredictionOutputsProcessor`` classes, as in ElasticDL; see `elasticdl.worker.inference`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class BasePredictionOutputsProcessor(ABC):
    """What to do with the outputs of a model."""

    @abstractmethod
    def process(self, predictions: Any, worker_id: int) -> None:
        """Called with each batch of outputs."""
