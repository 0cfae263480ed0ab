"""Operations that a script asks for by itself: whether all workers do, or some have gone on to something else.

Who waits for long in one of them says so in the world's store. Who waits for long in any other looks there. An operation that
nobody waits for pays nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.protocol import ALONE, World, WorldBroken
from elasticdl.elastic.link.store import KvStore, Refusal

SCOPE = "asked"
PATIENCE = 1.0  # seconds of waiting, before a worker speaks or looks


class Asked:
    """What this worker's script has asked for in the present world."""

    def __init__(self, store: KvStore) -> None:
        self._store = store
        self._world = ALONE
        self._number = 0  # of those that were asked for
        self._after = 0  # operations were begun before the last one
        self._what = ""
        self._is_asking = self._has_spoken = False

    @contextlib.contextmanager
    def asking(self, world: World, begun: int, what: str) -> Iterator[None]:
        """Within, the script waits for what it has asked for, after so many operations of this world. ``what``: in words."""
        self._number = 1 + (self._number if self._world is world else 0)
        self._world, self._after, self._what = world, begun, what
        self._is_asking, self._has_spoken = True, False
        try:
            yield
        finally:
            self._is_asking = False

    def meet(self) -> None:
        """Return when all members ask for the first in this world.

        Raises:
            WorldBroken: a member was lost.
        """
        self._speak()
        try:
            for rank in range(self._world.size):
                while self._store.get((SCOPE, str(rank)), PATIENCE, self._world.version) is None:
                    pass
        except Refusal as refusal:
            raise WorldBroken(f"world {self._world.version} broke while it was waited for {self._what}") from refusal

    def look(self, world: World, begun: int, last: str) -> None:
        """This worker waits for long in the operation of this name, the last of so many.

        Raises:
            UserError: another waits for what this one has passed by.
        """
        if self._is_asking:
            if not self._has_spoken:
                self._speak()
            return
        mine = self._number if self._world is world else 0
        with contextlib.suppress(Refusal):  # the world is broken, which is told elsewhere
            for rank in range(world.size):
                entry = self._store.get((SCOPE, str(rank)), 0.0, world.version)
                number, after, worker, what = (entry or b"0 0 0 ").decode().split(" ", 3)
                if int(number) > mine and int(after) < begun:
                    raise UserError(
                        f"worker {worker} waits for all workers at {what}, and worker {world.own.worker_id} has gone on to {last}: their scripts "
                        "must go one way, not another below `if rank == 0:`, nor by what one worker has seen of its part of a batch"
                    )

    def _speak(self) -> None:
        self._has_spoken = True
        world = self._world
        entry = f"{self._number} {self._after} {world.own.worker_id} {self._what}".encode()
        with contextlib.suppress(Refusal):
            self._store.put((SCOPE, str(world.rank)), entry, world.version)
