"""The final model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from elasticdl.common.errors import UserError

log = logging.getLogger(__name__)


def export(folder: Path, save: Callable[[Path], Path]) -> Path:
    """Make the folder and let ``save`` write the model into it.

    Raises:
        UserError: it could not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = save(folder)
    except OSError as error:
        raise UserError(f"--output {folder}: the model could not be written: {error.strerror or error}") from error
    log.info("model written to %s", path)
    return path
