"""What a trainer of the script's own and its callbacks hold travels, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elasticdl.elastic.torch_kit.pieces.model_attributes import Holder, holders_of_callbacks
from elasticdl.elastic.training.attributes import set_by

PACKAGES = ("transformers", "accelerate", "elasticdl")


def holders_of(trainer: Any) -> Iterator[Holder]:
    """The trainer, as far as it is not transformers', and the callbacks that are not."""
    kind: Any = type(trainer)
    yield Holder("trainer", "the trainer", trainer, set_by(kind, PACKAGES))
    yield from holders_of_callbacks(
        trainer.callback_handler.callbacks, PACKAGES, "make the callback an ExportableState"
    )
