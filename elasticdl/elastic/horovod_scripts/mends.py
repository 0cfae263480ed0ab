"""What Horovod 0.28 does not do right with PyTorch's optimizers, TensorFlow 2 and Keras 3, although it needs little.

In Keras 3 variables wrap those of TensorFlow, ``optimizer.variables`` is a list and no function, and an optimizer has
slots only when it is built, which on newcomers is later than the first synchronisation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from elasticdl.common.errors import UserError
from elasticdl.elastic.collectives.transfer import put_tensors, take_tensors


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
            own = take_tensors(self.value.state_dict(), torch.Tensor, tensors)
            kinds = [(each.shape, each.dtype) for each in tensors]
            tree, kinds = module.broadcast_object((own, kinds), root_rank=0, name="elasticdl.optimizer")
            is_root = module.rank() == 0
            values = [each.detach().cpu().contiguous() for each in tensors] if is_root else []
            values = values if is_root else [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
            # As bytes: Horovod does not know all types.
            parts = [(f"elasticdl.{i}", each.reshape(-1).view(torch.uint8)) for i, each in enumerate(values)]
            module.broadcast_parameters(parts, root_rank=0)
            # On rank 0 as well: Horovod's optimizer begins to count its backward passes anew.
            _load_in_place(self.value, self.value.state_dict() if is_root else put_tensors(tree, values))

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
        if _is_keras_3(optimizer):
            raise UserError(
                "hvd.DistributedOptimizer of Horovod 0.28 does not average the gradients of Keras 3: use "
                "hvd.DistributedGradientTape, or elasticdl.elastic.keras, or Keras 2 (tf_keras, TF_USE_LEGACY_KERAS=1)"
            )
        return real_create(keras, optimizer, *args, **kwargs)

    module.create_distributed_optimizer = create_distributed_optimizer


def mend_gradient_tape(module: Any) -> None:
    """``module``: ``horovod.tensorflow``. ``DistributedGradientTape`` copies this class."""
    tape_class = module._DistributedGradientTape
    real_gradient = tape_class.gradient

    @functools.wraps(real_gradient)
    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return real_gradient(tape, target, _of_tensorflow(sources), *args, **kwargs)

    tape_class.gradient = gradient


def mend_keras_state(module: Any) -> None:
    """``module``: ``horovod.tensorflow.elastic``. States on older Keras are left as they are."""
    state_class = module.TensorFlowKerasState
    real_broadcast, real_save, real_load = module._broadcast_model, state_class._save_model, state_class._load_model

    def broadcast_model(model: Any, optimizer: Any, backend: Any) -> None:
        if not _is_keras_3(optimizer):
            real_broadcast(model, optimizer, backend)
            return
        module.broadcast_variables(tensorflow_variables(model, optimizer), root_rank=0)

    def save_model(state: Any) -> None:
        if not _is_keras_3(state.optimizer):
            real_save(state)
            return
        variables = tensorflow_variables(state.model, state.optimizer)
        state._saved_model_state = [module.tf.identity(variable) for variable in variables]

    def load_model(state: Any) -> None:
        if not _is_keras_3(state.optimizer):
            real_load(state)
            return
        for variable, saved in zip(
            tensorflow_variables(state.model, state.optimizer), state._saved_model_state, strict=True
        ):
            variable.assign(saved)

    module._broadcast_model = broadcast_model
    state_class._save_model, state_class._load_model = save_model, load_model


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
        state.variables, state.session = _of_tensorflow(variables or module._global_variables()), None
        state._eval_fn, state._assign_fn = state._to_numpy, state._assign_var
        state._save_model()
        module.ObjectState.__init__(state, bcast_object=module.broadcast_object, get_rank=module.rank, **values)

    def sync(state: Any) -> None:
        if state.session is None:
            module.broadcast_variables(state.variables, root_rank=0)
        real_sync(state)

    state_class.__init__, state_class.sync = init, sync


def restore_lr(keras: Any) -> None:
    """``keras``: the package. ``optimizer.lr``, by which scripts set the rate after a change of workers, is gone in Keras 3:
    reading it raises, and assigning to it would quietly change nothing."""
    optimizer_class = keras.optimizers.Optimizer
    if not hasattr(optimizer_class, "lr"):
        optimizer_class.lr = property(
            lambda optimizer: optimizer.learning_rate,
            lambda optimizer, rate: setattr(optimizer, "learning_rate", rate),
        )


def _is_keras_3(optimizer: Any) -> bool:
    return not callable(optimizer.variables)


def tensorflow_variables(model: Any, optimizer: Any) -> list[Any]:
    """TensorFlow's variables of both, the seeds of random layers left out: workers need not draw the same."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return [*_of_tensorflow(model.weights), *_of_tensorflow(optimizer.variables)]


def _of_tensorflow(variables: Iterable[Any]) -> list[Any]:
    """What variables of Keras wrap: their ``value``, which with TensorFlow's own is a function and with tensors missing."""
    values = ((variable, getattr(variable, "value", None)) for variable in variables)
    return [variable if value is None or callable(value) else value for variable, value in values]
