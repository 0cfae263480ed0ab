"""What callbacks of `elasticdl.callbacks` keep beside a Keras model: a worker that comes later has it as the others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elasticdl.callbacks import Callback
from elasticdl.elastic.collectives.port import Collective
from elasticdl.elastic.core.world import World
from elasticdl.elastic.keras import callback_state
from elasticdl.elastic.training import plain_data
from elasticdl.elastic.training.attributes import is_open_file


class OwnCallbacks:
    """Those of the module's that are not Keras's."""

    def __init__(self, callbacks: Sequence[Callback], collective: Collective) -> None:
        self._callbacks = callbacks
        self._collective = collective
        self._first = [callback_state.take(callback) for callback in callbacks]
        self._received: list[dict[str, Any]] = []
        self._has_begun = False

    def enter(self, world: World) -> None:
        """Raises:
        WorldBroken: a member was lost meanwhile.
        """
        self._received = []
        if not self._callbacks or world.size == 1 or not world.needs_sync:
            return
        pairs = zip(self._callbacks, self._first, strict=True)
        mine = [callback_state.changed(callback, first) for callback, first in pairs] if world.rank == 0 else []
        sent = self._collective.broadcast_bytes(plain_data.dumps(mine), "elasticdl.own_callbacks")
        if not world.stands_with_root(world.rank):
            self._received = plain_data.loads(sent)

    def catch_up(self, begin_epoch: Callable[[], None]) -> None:
        """The callbacks have begun training. The files that they have opened there are this worker's."""
        if not self._has_begun:
            self._has_begun = True
            for callback, first in zip(self._callbacks, self._first, strict=True):
                present = callback_state.take(callback, copy=False)
                first.update({path: value for path, value in present.items() if is_open_file(value)})
        received, self._received = self._received, []
        if any(received):
            begin_epoch()
        for callback, changed in zip(self._callbacks, received, strict=False):
            callback_state.put(callback, changed)
