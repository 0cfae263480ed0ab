"""One optimizer step of a Keras model in traced functions, none of which knows the world."""

from __future__ import annotations

from typing import Any


class TrainStep:
    """INTERFACE (being filled in). The model must be built; the optimizer is built here."""

    def __init__(self, model: Any, loss: Any, optimizer: Any) -> None:
        """``loss(labels, predictions)``: a scalar mean, or one value per sample.

        Raises:
            UserError: the model is not built.
        """

    def warm_up(self, inputs: Any, labels: Any) -> None:
        """Trace and run everything once on this micro-batch; model and optimizer are afterwards as before."""
