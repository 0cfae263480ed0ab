"""What a trainer's callbacks hold travels, too; and a worker that comes later hears that the present epoch has begun."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from elasticdl.elastic.torch_kit.pieces.model_attributes import Holder, holders_of_callbacks

PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric", "elasticdl")


def holders_of(trainer: Any) -> Iterator[Holder]:
    """The script's own callbacks. Lightning's have a state of their own."""
    return holders_of_callbacks(trainer.callbacks, PACKAGES, "give the callback state_dict and load_state_dict")


def begin_epoch_as_others(trainer: Any) -> None:
    """What the hooks change of the job's state is replaced by that; what else they set, as of a data set, stays.

    Lightning calls them where an epoch begins, and not where one is resumed.
    """
    (package,) = {each.__module__.partition(".trainer.")[0] for each in type(trainer).__mro__ if _is_trainer(each)}
    call: Any = importlib.import_module(f"{package}.trainer.call")
    call._call_callback_hooks(trainer, "on_train_epoch_start")
    call._call_lightning_module_hook(trainer, "on_train_epoch_start")


def _is_trainer(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in PACKAGES and kind.__name__ == "Trainer"
