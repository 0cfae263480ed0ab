"""Items made ahead by a thread, a bounded number of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Iterates over ``source`` in a thread that is ``depth`` items ahead at most. Close it, also after an error.

    The thread ends when the source ends, raises, or at the next item after `close`; it is not waited for.
    """

    def __init__(self, source: Iterator[T], depth: int) -> None:
        self._source = source
        self._depth = depth
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="elasticdl-prefetch", daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Raises:
        Exception: the source's own, once the items before it have been taken.
        """
        with self._changed:
            # No deadline: how long a user's data take is theirs; the master sees a worker that makes no progress.
            self._changed.wait_for(lambda: self._items or self._ended or self._closed)
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    return
        except BaseException as error:  # noqa: BLE001 - raised again where the item is waited for
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: T) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if self._closed:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True
