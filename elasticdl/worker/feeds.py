"""A module's ``feed`` over the records of files, in the place of its ``dataset(mode, path)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from elasticdl.common.errors import ArgumentError, UserError
from elasticdl.common.params import parse_params
from elasticdl.common.reason import name_of, shown
from elasticdl.common.spec import JobSpec

Function = Callable[..., Any]
OLDER_NAME = "dataset_fn"
OPTIONS = {"training": "training_data", "evaluation": "validation_data"}


def refuse_feed(opener: object, path: Path) -> None:
    """For a model that is not of Keras. ``opener``: how the module's data are opened; ``path``: of the module.

    Raises:
        UserError: it is a feed.
    """
    if isinstance(opener, FeedOpener):
        name = name_of(opener.feed)
        raise UserError(
            f"{shown(path)}: {name} makes tf.data.Dataset samples, for a Keras model; expected dataset(mode, path) for a "
            "PyTorch model"
        )


@dataclass(frozen=True, slots=True)
class FeedOpener:
    """Called as ``dataset(mode, path)``; what it returns also has ``__getitems__(indices)``, for whole batches."""

    feed: Function
    reader: Function | None  # the module's custom_data_reader
    params: Mapping[str, object]

    def __call__(self, mode: str, path: str) -> Any:
        """Raises:
        ArgumentError: the path names no files.
        UserError: a file is damaged, or ``feed`` can't be used.
        """
        from elasticdl.data.custom_reader import open_custom
        from elasticdl.data.open import open_records

        if not path:
            raise ArgumentError(f"--{OPTIONS[mode]} is missing; expected the files of records for {name_of(self.feed)}")
        if self.reader:
            records = open_custom(self.reader, path, mode, dict(self.params))
        else:
            records = open_records(path, self.params)
        # Imported last: TensorFlow takes seconds, and the files may be what is wrong.
        from elasticdl.data.feed import FeedDataset

        return FeedDataset(records, self.feed, mode)


def find_feed(module: ModuleType, spec: JobSpec, path: Path) -> FeedOpener | None:
    """The ``feed`` of a module that has no ``dataset``, or for which ``--feed`` names one.

    Raises:
        UserError: there is no function of a name that an option gives.
    """
    asked = spec.feed != JobSpec.model_fields["feed"].default
    if hasattr(module, spec.dataset) and not asked:
        return None
    feed = _function(module, path, spec.feed, required=asked) or _function(module, path, OLDER_NAME, required=False)
    if feed is None:
        return None
    own_reader = spec.custom_data_reader != JobSpec.model_fields["custom_data_reader"].default
    reader = _function(module, path, spec.custom_data_reader, required=own_reader)
    return FeedOpener(feed, reader, parse_params("data_reader_params", spec.data_reader_params))


def _function(module: ModuleType, path: Path, name: str, required: bool) -> Function | None:
    found: Function | None = getattr(module, name, None)
    if found is None and not required:
        return None
    if not callable(found):
        raise UserError(f"{shown(path)} has no function {name}")
    return found
