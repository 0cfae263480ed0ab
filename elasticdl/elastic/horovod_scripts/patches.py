"""What is put in place of functions of Horovod, when the module that holds them has been imported.

Each patch asks first whether this process takes part in the job as a script of Horovod's; if it does not, since it uses
`elasticdl.elastic` or is a child of a worker, Horovod's own function is called.

And what Horovod itself does not do right.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.transfer import with_tensors, without_tensors
from elasticdl.elastic.horovod_scripts.script_worker import ScriptWorker, is_failed_collective

# What Horovod 0.28 does not do right with PyTorch's optimizers and TensorFlow 2, although it needs little. Keras 3 it can't read at all.


def mend_optimizer_state(module: Any, takes_part: Callable[[], bool]) -> None:
    """``module``: ``horovod.torch.elastic.state``. Of an optimizer without slots, as SGD without momentum, its handler sends nothing,
    neither the learning rate. And where there are no slots yet it makes a step with gradients of zero, which weight decay
    turns into other weights."""
    torch = module.torch
    theirs: Any = module.OptimizerStateHandler

    class OptimizerStateHandler(theirs):  # type: ignore[misc]
        def sync(self) -> None:
            if not takes_part():
                super().sync()
                return
            tensors: list[Any] = []
            own = without_tensors(self.value.state_dict(), torch.Tensor, tensors)
            kinds = [(each.shape, each.dtype) for each in tensors]
            tree, kinds = module.broadcast_object((own, kinds), root_rank=0, name="elasticdl.optimizer")
            is_root = module.rank() == 0
            values = [each.detach().cpu().contiguous() for each in tensors] if is_root else []
            values = values if is_root else [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
            # Apart from the object, which must be below 2 GiB. As bytes: Horovod does not know all types.
            parts = [(f"elasticdl.{i}", each.reshape(-1).view(torch.uint8)) for i, each in enumerate(values)]
            module.broadcast_parameters(parts, root_rank=0)
            # On rank 0 as well: Horovod's optimizer begins to count its backward passes anew.
            _load_in_place(self.value, self.value.state_dict() if is_root else with_tensors(tree, values))

        def restore(self) -> None:
            _load_in_place(self.value, self._saved_optimizer_state)

    kinds = [(kind, OptimizerStateHandler if its is theirs else its) for kind, its in module.get_handler_registry()]
    module.set_handler_registry(kinds)


def _load_in_place(optimizer: Any, state: Any) -> None:
    """As ``load_state_dict``. The groups stay the objects that they are: a scheduler may hold them, as of the optimizer that is wrapped."""
    groups, held = optimizer.param_groups, list(optimizer.param_groups)
    optimizer.load_state_dict(state)
    for group, loaded in zip(held, optimizer.param_groups, strict=True):
        group.clear()
        group.update(loaded)
    groups[:] = held
    optimizer.param_groups = groups


def refuse_optimizer(module: Any) -> None:
    """``module``: ``horovod._keras``. Its ``DistributedOptimizer`` hooks functions that Keras 3 never calls, so that each
    worker would quietly train a model of its own."""
    real_create = module.create_distributed_optimizer

    @functools.wraps(real_create)
    def create_distributed_optimizer(keras: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not callable(optimizer.variables):  # with Keras 2 it is a function
            raise UserError(
                "hvd.DistributedOptimizer of Horovod 0.28 does not average the gradients of Keras 3: use "
                "elasticdl.elastic.keras, or Keras 2 (tf_keras, TF_USE_LEGACY_KERAS=1)"
            )
        return real_create(keras, optimizer, *args, **kwargs)

    module.create_distributed_optimizer = create_distributed_optimizer


def mend_keras_callbacks(module: Any) -> None:
    """``module``: ``horovod.tensorflow.keras.callbacks``, whose backend is that of the package ``keras``: of Keras 3, also where
    TensorFlow has Keras 2, by ``TF_USE_LEGACY_KERAS``."""
    module.K = module.keras.backend


def mend_tensorflow_state(module: Any) -> None:
    """``module``: ``horovod.tensorflow.elastic``. Without a session the state's variables are sent when it is made, where a
    newcomer waits for ever for those who train, and never by ``sync``."""
    state_class = module.TensorFlowState
    real_init, real_sync = state_class.__init__, state_class.sync

    @functools.wraps(real_init)
    def init(state: Any, variables: Any = None, session: Any = None, **values: Any) -> None:
        if not module._executing_eagerly():
            real_init(state, variables, session, **values)
            return
        state.variables, state.session = variables or module._global_variables(), None
        state._eval_fn, state._assign_fn = state._to_numpy, state._assign_var
        state._save_model()
        module.ObjectState.__init__(state, bcast_object=module.broadcast_object, get_rank=module.rank, **values)

    def sync(state: Any) -> None:
        if state.session is None:
            module.broadcast_variables(state.variables, root_rank=0)
        real_sync(state)

    state_class.__init__, state_class.sync = init, sync


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
            "horovod.tensorflow.elastic": self._patch_tensorflow,
            "horovod.tensorflow.keras.callbacks": mend_keras_callbacks,
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
        mend_tensorflow_state(module)

        @functools.wraps(real_run)
        def run(func: Callable[..., Any]) -> Callable[..., Any]:
            return self._ours(real_run(func), module.run_fn(func, module._reset))

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
