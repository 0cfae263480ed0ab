"""What is put in place of functions of Horovod, when the module that holds them has been imported.

Each patch asks first whether this process takes part in the job as a script of Horovod's; if it does not, since it uses
`elasticdl.elastic` or is a child of a worker, Horovod's own function is called.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from elasticdl.elastic.horovod_scripts.keras_callbacks import mend_callbacks
from elasticdl.elastic.horovod_scripts.mends import (
    mend_gradient_tape,
    mend_keras_state,
    mend_optimizer_state,
    mend_tensorflow_state,
    refuse_optimizer,
    restore_lr,
)
from elasticdl.elastic.horovod_scripts.script_worker import ScriptWorker, is_failed_collective


@dataclass(frozen=True, slots=True)
class Basics:
    """The unpatched functions of one ``HorovodBasics`` (one per framework), and the arguments of an ``init``."""

    basics: Any
    real_init: Callable[..., None]
    real_shutdown: Callable[..., None]
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = field(default=((), {}), compare=False)

    def init(self) -> None:
        args, kwargs = self.arguments
        self.real_init(self.basics, *args, **kwargs)

    def shutdown(self) -> None:
        self.real_shutdown(self.basics)

    def is_initialized(self) -> bool:
        return bool(self.basics.is_initialized())


class Patches:
    """All patches of one process, around one worker."""

    def __init__(self) -> None:
        self._worker = ScriptWorker(os.environ)
        self._by_module = {
            "horovod.common.basics": self._patch_basics,
            "horovod.common.elastic": self._patch_elastic,
            "horovod._keras": refuse_optimizer,
            "horovod._keras.callbacks": mend_callbacks,
            "horovod.tensorflow": mend_gradient_tape,
            "horovod.tensorflow.elastic": self._patch_tensorflow,
            "horovod.torch.elastic.state": self._patch_torch,
        }

    def apply(self, module: ModuleType) -> None:
        self._by_module[module.__name__](module)

    def _ours(self, theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return (ours if self._worker.takes_part else theirs)(*args, **kwargs)

        return patched

    def _patch_basics(self, module: Any) -> None:
        worker, cls = self._worker, module.HorovodBasics
        real_init, real_shutdown = cls.init, cls.shutdown

        @functools.wraps(real_init)
        def init(basics: Any, *args: Any, **kwargs: Any) -> None:
            if worker.claim():
                worker.init(Basics(basics, real_init, real_shutdown, (args, kwargs)))
            else:
                real_init(basics, *args, **kwargs)

        @functools.wraps(real_shutdown)
        def shutdown(basics: Any) -> None:
            if worker.holds(Basics(basics, real_init, real_shutdown)):
                worker.shutdown()
            else:
                real_shutdown(basics)

        cls.init, cls.shutdown = init, shutdown

    def _patch_elastic(self, module: Any) -> None:
        worker, state_class = self._worker, module.State
        real_check, real_run_fn, manager = state_class.check_host_updates, module.run_fn, module.notification_manager

        def check(state: Any) -> None:
            # At every check, not once when it is heard of: what comes in while a world is being entered is not lost. And
            # by the number of the world, not a time in whole seconds, within which a second change would be lost.
            if worker.leaving:
                manager.handle_hosts_updated(worker.world.version, module.HostUpdateResult.added)
            real_check(state)

        def commit(state: Any) -> None:
            state.save()
            worker.pass_by()
            worker.committed()  # a pause has ended before
            check(state)

        def check_host_updates(state: Any) -> None:
            worker.pass_by()
            try:
                check(state)
            except module.HostsUpdatedInterrupt:
                state.save()
                worker.committed()
                raise

        def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
            def run_through_worlds(state: Any, *args: Any, **kwargs: Any) -> Any:
                manager.register_listener(state)
                try:
                    with worker.drained_by_sigterm():
                        train = functools.partial(func, state, *args, **kwargs)
                        result = train_through_worlds(worker, train, state, reset, module.HostsUpdatedInterrupt)
                finally:
                    manager.remove_listener(state)
                worker.finish()
                return result

            return self._ours(real_run_fn(func, reset), run_through_worlds)

        state_class.commit = self._ours(state_class.commit, commit)
        state_class.check_host_updates = self._ours(real_check, check_host_updates)
        module.run_fn = run_fn

    def _patch_torch(self, module: Any) -> None:
        mend_optimizer_state(module, lambda: self._worker.takes_part)

    def _patch_tensorflow(self, module: Any) -> None:
        """Its ``run`` swallows errors before `run_fn` sees them."""
        real_run = module.run
        mend_keras_state(module)
        mend_tensorflow_state(module)

        @functools.wraps(real_run)
        def run(func: Callable[..., Any]) -> Callable[..., Any]:
            ours = module.run_fn(func, module._reset)

            def run_with_keras(*args: Any, **kwargs: Any) -> Any:
                if keras := sys.modules.get("keras"):  # only now, as TensorFlow imports it when it is asked for
                    restore_lr(keras)
                return ours(*args, **kwargs)

            return self._ours(real_run(func), run_with_keras)

        module.run = run


def train_through_worlds(
    worker: ScriptWorker,
    train: Callable[[], Any],
    state: Any,
    reset: Callable[[], None],
    hosts_updated: type[Exception],
) -> Any:
    """Horovod's `run_fn`, with the ways out of it closed that lose a job: call ``train`` in each world until it returns.

    ``state``: a ``horovod.common.elastic.State``. ``reset`` leaves a world and enters the next. In Horovod's own, a failure
    while the last one is being mended (in ``reset`` or a reset callback) ends the worker; a newcomer that is synchronised
    and has not committed goes back to its initial weights; a change that is noticed between two commits pairs live weights
    with committed counters. In TensorFlow only an ``UnknownError`` that names one of three operations counts as a failure,
    errors of other classes end the worker, and any other ``UnknownError`` is swallowed: training seems to have finished.
    """
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
            worker.leave_together()  # the state was saved where this was raised
        except Exception as error:
            if not is_failed_collective(error):
                raise
            worker.failed(error)
            state.restore()
