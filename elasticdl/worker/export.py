"""The final model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line

log = logging.getLogger(__name__)


def export(folder: Path, save: Callable[[Path], Path]) -> Path:
    """Make the folder and let ``save`` write the model into it.

    Raises:
        UserError: it could not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = save(folder)
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of some
        raise UserError(f"--output {folder}: the model could not be written: {one_line(error)}") from error
    log.info("model written to %s", path)
    return path
