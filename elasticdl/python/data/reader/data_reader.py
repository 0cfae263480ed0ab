"""The base of readers that ``custom_data_reader`` returns; see `elasticdl.data.custom_reader` for how they are used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


class Metadata:
    """What is known of all records; a reader may add to it."""

    def __init__(self, column_names: list[str] | None = None) -> None:
        self.column_names = column_names


class AbstractDataReader(ABC):
    """Records in shards."""

    def __init__(self, **kwargs: object) -> None:  # noqa: B027 - readers call it with what they were given
        """Takes and ignores anything."""

    @abstractmethod
    def read_records(self, task: Any) -> Iterator[Any]:
        """Just the records ``task.shard.start`` up to ``task.shard.end`` of the shard ``task.shard.name``."""

    @abstractmethod
    def create_shards(self) -> Mapping[str, tuple[int, int]]:
        """First record and number of records of each shard, by name."""

    def preprocess_records(self, records: Iterator[Any]) -> Iterator[Any]:
        """One record for each."""
        return records

    @property
    def records_output_types(self) -> Any:
        """Not asked for: types are those of the records."""
        return None

    @property
    def metadata(self) -> Metadata:
        """Given to ``feed``."""
        return Metadata()


def check_required_kwargs(required_args: Iterable[str], kwargs: Mapping[str, object]) -> None:
    """Raises: ValueError: one is missing."""
    if missing := [name for name in required_args if name not in kwargs]:
        raise ValueError(f"these arguments are missing: {', '.join(missing)}")
