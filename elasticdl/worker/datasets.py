"""Opening the user's data sets, and what is required of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.common.reason import shown
from elasticdl.common.spec import JobSpec
from elasticdl.worker.feeds import OPTIONS, FeedOpener
from elasticdl.worker.user_code import blame
from elasticdl.worker.zoo import ModelModule

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Datasets:
    """Anything with ``__len__`` and ``__getitem__``; ``evaluation`` is None if there is nothing to evaluate on."""

    training: Any
    evaluation: Any | None


def open_datasets(module: ModelModule, spec: JobSpec) -> Datasets:
    """Open and look at both.

    Without ``--validation_data`` or ``--evaluation_steps`` nobody has asked for an evaluation: a module that has no
    data for it may say so with a ValueError, and training goes without.

    Raises:
        UserError: ``dataset()`` raised, or what it returned can't be used.
    """
    training = _open(module, "training", spec.training_data)
    asked = bool(spec.validation_data or spec.evaluation_steps)
    try:
        evaluation = _open(module, "evaluation", spec.validation_data)
    except UserError as error:
        if asked or not isinstance(error.__cause__, ValueError | OSError):
            raise
        log.warning("no evaluation: %s", error)
        evaluation = None
    return Datasets(training, evaluation)


def _open(module: ModelModule, mode: str, path: str) -> Any:
    is_feed = isinstance(module.dataset, FeedOpener)
    call = f"feed over --{OPTIONS[mode]} {path}".rstrip() if is_feed else f"dataset({mode!r}, {path!r})"
    with blame(call, module.folder):
        try:
            dataset = module.dataset(mode, path)
        except ValueError as error:
            if len(lines := str(error).splitlines()) != 1:
                raise
            about = f"{call}: " if path or not is_feed else ""  # without a path, a feed's line names the option itself
            raise UserError(f"{about}{lines[0]}") from error  # the contract's way to refuse a path
    where = f"{shown(module.path)}: {call}"
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(f"{where} returned {type(dataset).__name__}; expected something with len() and [index]")
    with blame(f"len of {call}", module.folder):
        samples = len(dataset)
    if samples == 0:
        raise UserError(f"{where} has no samples; expected at least one")
    with blame(f"{call}[0]", module.folder):
        sample = dataset[0]
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise UserError(f"{where}[0] is {type(sample).__name__}; expected a pair (inputs, label)")
    return dataset
