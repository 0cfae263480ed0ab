"""Which worker writes: ``TrainingArguments`` says so by properties, of which two depend on the worker's rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def follow_rank(args: Any, is_first: Callable[[], bool]) -> None:
    """Have these ``TrainingArguments`` say that files are written where ``is_first`` holds at that time."""
    plain = type(args)

    class ElasticArguments(plain):  # type: ignore[misc, valid-type]
        @property
        def should_save(self) -> bool:
            return is_first()

        @property
        def should_log(self) -> bool:
            return is_first()

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Saved with a model, they are what the script has made."""
            return object.__new__, (plain,), dict(vars(self))

    ElasticArguments.__name__, ElasticArguments.__qualname__ = plain.__name__, plain.__qualname__
    args.__class__ = ElasticArguments
