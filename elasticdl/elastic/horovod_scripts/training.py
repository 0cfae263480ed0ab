"""The loop behind ``@hvd.elastic.run``: Horovod's `run_fn`, with the ways out of it closed that lose a job.

In Horovod's own, a failure while the last one is being mended (in ``reset`` or a reset callback) ends the worker; a
newcomer that is synchronised and has not committed goes back to its initial weights; a change that is noticed between two
commits pairs live weights with committed counters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from elasticdl.elastic.horovod_scripts.failures import is_failed_collective
from elasticdl.elastic.horovod_scripts.script_worker import ScriptWorker


class HorovodState(Protocol):
    """``horovod.common.elastic.State``."""

    def on_reset(self) -> None: ...
    def save(self) -> None: ...
    def restore(self) -> None: ...
    def sync(self) -> None: ...


def train_through_worlds(
    worker: ScriptWorker,
    train: Callable[[], Any],
    state: HorovodState,
    reset: Callable[[], None],
    hosts_updated: type[Exception],
) -> Any:
    """Call ``train`` in each world until it returns; ``reset`` leaves a world and enters the next."""
    in_new_world = False
    while True:
        try:
            if in_new_world:
                reset()
                state.on_reset()
            in_new_world = True
            state.sync()
            state.save()  # what was received is from now on what `restore` goes back to
            worker.synced()
            return train()
        except hosts_updated:
            worker.left()  # the state was saved where this was raised
        except Exception as error:
            if not is_failed_collective(error):
                raise
            worker.failed(error)
            state.restore()
