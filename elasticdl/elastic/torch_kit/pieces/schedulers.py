"""A script's schedulers, on a worker that has the job's state and is yet to come to where the job stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


def rest_while(is_idle: Callable[[], bool], scheduler: LRScheduler) -> None:
    """Have its ``step`` do nothing where ``is_idle``: it stands where the job stands already, and a step past its last is an error.

    It has another class of the same name then: an attribute would be part of its state.
    """
    plain: Any = type(scheduler)

    class Resting(plain):  # type: ignore[misc]
        def step(self, *args: Any, **kwargs: Any) -> None:
            if not is_idle():
                super().step(*args, **kwargs)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Saved or copied, it is what the script has made."""
            return object.__new__, (plain,), dict(vars(self))

    Resting.__name__, Resting.__qualname__, Resting.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    scheduler.__class__ = Resting
