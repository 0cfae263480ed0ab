"""Which framework a model-zoo module is written for: found from the model that it makes, importing no other."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import MutableMapping
from typing import Any, TypeVar

from elasticdl.common.errors import UserError
from elasticdl.common.reason import name_of, shown
from elasticdl.elastic.core.plan import step_seed
from elasticdl.elastic.training.cursor import seed_generators
from elasticdl.worker.learner import Learner
from elasticdl.worker.zoo import ModelModule

OptimizerT = TypeVar("OptimizerT")


# What of a framework can be known without importing it: a module below `elasticdl.worker`, and its learner.
TORCH = "torch_learner:TorchLearner"
KERAS = "keras_learner:KerasLearner"
FRAMEWORKS = ("torch", "keras", "tf_keras")  # as a message names them

DEFAULTS = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # it may share its GPU
}


def import_learner(framework: str) -> type[Learner]:
    """Imports the framework, too."""
    learner: type[Learner] = pkgutil.resolve_name(f"elasticdl.worker.{framework}")
    return learner


def import_torch() -> None:
    """For a process from which workers are forked."""
    import_learner(TORCH)


def import_keras() -> None:
    """For a process from which workers are forked."""
    set_defaults(os.environ)
    import_learner(KERAS)


def set_defaults(environ: MutableMapping[str, str]) -> None:
    """What frameworks read from the environment when they are imported, unless the user has set it."""
    for name, value in DEFAULTS.items():
        environ.setdefault(name, value)


def build_model(module: ModelModule, seed: int) -> Any:
    """The module's model; every worker builds the same."""
    _seed(step_seed(seed, 0, 0))
    if "keras" in sys.modules or ("tensorflow" in sys.modules and "torch" not in sys.modules):
        # TensorFlow must hear of its devices before anything is built.
        importlib.import_module("elasticdl.elastic.keras.tensorflow_adapter").prepare_devices()
    return module.custom_model(**module.model_params)


def framework_of(model: Any, module: ModelModule) -> str:
    """Raises UserError if the model is of no framework that can be trained."""
    # A Keras model over PyTorch is a torch.nn.Module as well.
    if _is_a(model, "keras", "Model"):
        return KERAS
    if _is_a(model, "torch.nn", "Module"):
        return TORCH
    call = f"{shown(module.path)}: {name_of(module.custom_model)}()"
    if any(parent.__module__.startswith("tf_keras") for parent in type(model).__mro__):
        raise UserError(f"{call} returned a model of Keras 2; expected one of Keras 3: unset TF_USE_LEGACY_KERAS")
    raise UserError(f"{call} returned {type(model).__name__}; expected a torch.nn.Module or a keras.Model")


def make_optimizer(module: ModelModule, framework: str, kind: type[OptimizerT], **arguments: Any) -> OptimizerT:
    """What the module's ``optimizer`` returns when it is given these, by position."""
    name = name_of(module.optimizer)
    optimizer = module.optimizer(*arguments.values())
    if not isinstance(optimizer, kind):
        raise UserError(
            f"{shown(module.path)}: {name}({', '.join(arguments)}) returned {kind_of(optimizer)}; "
            f"expected a {'torch.optim' if framework == TORCH else 'keras.optimizers'}.Optimizer"
        )
    return optimizer


def kind_of(value: object) -> str:
    """A value's type in a message: with the framework that it comes from."""
    package = type(value).__module__.partition(".")[0]
    return f"{package}'s {type(value).__name__}" if package in FRAMEWORKS else type(value).__name__


def _is_a(value: object, module: str, name: str) -> bool:
    """As isinstance, with a type that can't be the value's as long as its module has not been imported."""
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and isinstance(value, found)


def _seed(value: int) -> None:
    """The global generators of all that the user's module has imported. Keras draws its seeds from Python's."""
    seed_generators(value)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(value)
    if tensorflow := sys.modules.get("tensorflow"):
        tensorflow.random.set_seed(value)
