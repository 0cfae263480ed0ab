"""Items made ahead by a thread, a bounded number of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    """Follows the last item."""

    error: BaseException | None = None


class Prefetch(Generic[T]):
    """Iterates over ``source`` in a thread that is ``depth`` items ahead at most. Close it, also after an error.

    The thread ends when the source ends, raises, or at the next item after `close`; it is not waited for.
    """

    def __init__(self, source: Iterator[T], depth: int) -> None:
        self._source = source
        self._room = Semaphore(depth)
        self._items: SimpleQueue[T | _End] = SimpleQueue()
        self._closed = False
        self.thread = Thread(target=self._run, name="elasticdl-prefetch", daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Raises:
        Exception: the source's own, once the items before it have been taken.
        """
        # No deadline: how long a user's data take is theirs; the master sees a worker that makes no progress.
        item = _End() if self._closed else self._items.get()
        if not isinstance(item, _End):
            self._room.release()
            return item
        self.close()
        raise item.error or StopIteration

    def close(self) -> None:
        self._closed = True
        self._room.release()  # the thread may wait for it
        self._items.put(_End())  # as may `__next__`, in another thread

    def _run(self) -> None:
        end = _End()
        try:
            for item in self._source:
                self._room.acquire()
                if self._closed:
                    break
                self._items.put(item)
        except BaseException as error:  # noqa: BLE001 - raised again where the item is waited for
            end = _End(error)
        finally:
            self._items.put(end)
