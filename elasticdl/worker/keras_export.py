"""The final model of a Keras training: ``model.keras``, and beside it a SavedModel for serving."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import keras

from elasticdl.common.reason import one_line

log = logging.getLogger(__name__)

MODEL = "model.keras"
SERVED = "saved_model"


def save_model(model: keras.Model, folder: Path) -> Path:
    """Each is written aside and then renamed. Not every model can be traced for serving: that is a warning.

    Raises:
        OSError: the folder can't be written.
    """
    with _aside(folder / MODEL) as scratch:
        model.save(scratch)
    try:
        with _aside(folder / SERVED) as scratch:
            model.export(scratch, verbose=False)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - tracing runs the user's model, which may raise anything
        log.warning("%s has been written, but no SavedModel: %s", folder / MODEL, one_line(error))
    return folder / MODEL


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A path beside the given one, which takes its place if all goes well."""
    scratch = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield scratch
        _remove(path)
        scratch.rename(path)
    finally:
        _remove(scratch)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
