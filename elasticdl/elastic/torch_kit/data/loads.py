"""What a script loads within a step by another loader than the one it trains on, as of samples without labels.

A torn step is made again, perhaps by the script's own code, and an iterator can't be set back: it would stand one batch further on this worker
than on those that come later, to the end of the training. So what it has given within the step is given again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, dataloader

_OWN = "_is_elasticdls_own"

_of_thread = threading.local()  # the `Loads` of the step that is made, as workers may be threads of a process


@dataclass(slots=True)
class _Given:
    iterator: Any  # kept, so that its id stays its own
    values: list[Any] = field(default_factory=list)
    at: int = 0  # the number of the value that comes next


class Loads:
    """Of the steps of a worker."""

    def __init__(self) -> None:
        self.begin_anew = True  # on a worker that comes later, unless its script passes by all that was trained on
        self._given: dict[int, _Given] = {}  # in this step, by ids of iterators
        self._may_be_torn = False
        self._kind = ""  # of an iterator that has given something within a step
        self._has_told = False

    def begin(self, *, may_be_torn: bool) -> None:
        """A step begins, or begins again."""
        self._may_be_torn |= may_be_torn
        _see_all()
        _of_thread.loads = self

    def end(self) -> None:
        """The step can't be torn any more, or is not made here."""
        self._given.clear()
        self._may_be_torn = False
        if getattr(_of_thread, "loads", None) is self:
            _of_thread.loads = None

    def note(self) -> dict[int, int]:
        """How many values each iterator has given."""
        return {key: given.at for key, given in self._given.items()}

    def put_back(self, noted: Mapping[int, int]) -> None:
        """What was given since then is given again."""
        for key, given in self._given.items():
            given.at = noted.get(key, 0)

    def tell(self, tell: Callable[[str], None]) -> None:
        """A worker comes later. Where it has other samples, that is told once."""
        if self.begin_anew and self._kind and not self._has_told:
            self._has_told = True
            tell(
                f"the script reads another DataLoader within its training step (by a {self._kind}), and a worker that comes later begins that loader "
                "anew: so workers train on other samples of it. Choose these samples by the step's number, such as trainer.global_step"
            )

    def take(self, iterator: Any, load: Callable[[], Any]) -> Any:
        self._kind = type(iterator).__name__
        if not self._may_be_torn:
            return load()
        given = self._given.setdefault(id(iterator), _Given(iterator))
        if given.at == len(given.values):
            given.values.append(load())
        given.at += 1
        return given.values[given.at - 1]


def own(loader: DataLoader[Any]) -> Iterator[Any]:
    """``iter(loader)``, of which nothing is kept."""
    iterator = iter(loader)
    setattr(iterator, _OWN, True)
    return iterator


@functools.cache
def _see_all() -> None:
    """What any ``DataLoader`` gives; once in a process."""
    kind: Any = dataloader._BaseDataLoaderIter
    load = kind.__next__

    @functools.wraps(load)
    def seen(iterator: Any) -> Any:
        loads: Loads | None = getattr(_of_thread, "loads", None)
        if loads is None or hasattr(iterator, _OWN):
            return load(iterator)
        return loads.take(iterator, lambda: load(iterator))

    kind.__next__ = seen
