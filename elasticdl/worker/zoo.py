"""Loading a model-zoo module and checking it against the contract (docs/model_zoo.md)."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, cast

from elasticdl.callbacks import Callback
from elasticdl.common.errors import UserError
from elasticdl.common.params import parse_params
from elasticdl.common.reason import name_of, shown
from elasticdl.common.spec import JobSpec
from elasticdl.worker.feeds import find_feed
from elasticdl.worker.user_code import blame

DEFAULT_MODEL = "custom_model"
FEED = ", or feed(dataset, mode, metadata) over the files of --training_data (docs/data.md)"
PARAMETERS = {
    "loss": ("labels", "predictions"),
    "dataset": ("mode", "path"),
    "eval_metrics_fn": (),
    "callbacks": (),
    "metric": ("labels", "outputs"),
}

OWN_CALLBACKS: Mapping[str, type] = MappingProxyType({"elasticdl.callbacks.Callback": Callback})
NONE: Mapping[str, object] = MappingProxyType({})

Function = Callable[..., Any]
Metrics = Mapping[str, Any]  # by name; of a model with several outputs, by output and name


@dataclass(frozen=True, slots=True)
class ModelModule:
    """The functions of a model-zoo module, under the names of the contract."""

    custom_model: Function
    model_params: Mapping[str, object]  # with which to call it
    loss: Function
    optimizer: Function  # its parameters depend on the framework: see `require_optimizer`
    dataset: Function
    eval_metrics_fn: Function | None
    callbacks: Function | None
    path: Path
    folder: Path  # the zoo

    def make_model(self) -> Any:
        return self.custom_model(**self.model_params)


@dataclass(frozen=True, slots=True)
class _Place:
    name: str  # dotted
    path: Path
    function: str


def load_module(spec: JobSpec) -> ModelModule:
    """Import the module that ``spec.model_def`` names below ``spec.model_zoo``; the folder goes on ``sys.path``.

    Raises:
        UserError: there is no such folder, module or function, it has another signature, or the module raises.
    """
    folder = Path(spec.model_zoo).resolve()
    if not folder.is_dir():
        raise UserError(f"--model_zoo {spec.model_zoo} is not a folder; expected the folder that holds --model_def")
    place = _locate(folder, spec.model_def)
    params = parse_params("model_params", spec.model_params)
    module = _import(folder, place)
    if place.path.name == "__init__.py" and "." in spec.model_def and not hasattr(module, place.function):
        raise _missing(folder, spec.model_def)
    return ModelModule(
        custom_model=_require(module, place.path, place.function, (), params),
        model_params=params,
        loss=_require(module, place.path, spec.loss, PARAMETERS["loss"]),
        optimizer=_require(module, place.path, spec.optimizer, None),
        dataset=find_feed(module, spec, place.path)
        or _require(module, place.path, spec.dataset, PARAMETERS["dataset"], otherwise=FEED),
        eval_metrics_fn=_optional(module, place.path, "eval_metrics_fn", spec.eval_metrics_fn),
        callbacks=_optional(module, place.path, "callbacks", spec.callbacks),
        path=place.path,
        folder=folder,
    )


def require_optimizer(module: ModelModule, parameters: tuple[str, ...], why: str) -> None:
    """Raises:
    UserError: ``optimizer`` can't be called with these parameters, as ``why`` demands.
    """
    _require_signature(module.optimizer, name_of(module.optimizer), module.path, parameters, why=why)


def make_callbacks(module: ModelModule, kinds: Mapping[str, type] = OWN_CALLBACKS) -> list[Any]:
    """``kinds``: of what the callbacks may be, by the names that a message gives them.

    Raises:
        UserError: ``callbacks()`` returns something else than a list of callbacks.
    """
    callbacks = list(module.callbacks() or ()) if module.callbacks else []  # ElasticDL's own modules return None
    for callback in callbacks:
        if not isinstance(callback, tuple(kinds.values())):
            raise UserError(
                f"{shown(module.path)}: callbacks() returned a list with {type(callback).__name__}; "
                f"expected objects made from {' or '.join(kinds)}"
            )
    return callbacks


def make_metrics(module: ModelModule, *, nested: bool = False) -> Metrics:
    """``nested``: may be by output and name, for a model of several outputs.

    Raises:
        UserError: ``eval_metrics_fn()`` returns something else than functions by name.
    """
    metrics = module.eval_metrics_fn() if module.eval_metrics_fn else {}
    if not isinstance(metrics, dict):
        raise _no_metrics(module, type(metrics).__name__)
    for name, found in metrics.items():
        for metric in found.values() if nested and isinstance(found, dict) else [found]:
            if not callable(metric):
                raise _no_metrics(module, f"a dict whose {name!r} is {metric!r}")
            if not isinstance(metric, type) and not hasattr(metric, "update_state"):
                _require_signature(metric, f"metric {name!r}", module.path, PARAMETERS["metric"])
    return cast(Metrics, metrics)


def _no_metrics(module: ModelModule, returned: str) -> UserError:
    return UserError(
        f"{shown(module.path)}: eval_metrics_fn() returned {returned}; "
        "expected a dict of functions (labels, outputs) by name"
    )


def _locate(folder: Path, model_def: str) -> _Place:
    parts = model_def.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"--model_def {model_def!r} is not MODULE[.FUNCTION], as in digits.cnn_torch")
    for count in (len(parts), len(parts) - 1):  # the longest name that is a module; what is left is the function
        base = folder.joinpath(*parts[:count])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if count and path.is_file():
                return _Place(".".join(parts[:count]), path, ".".join(parts[count:]) or DEFAULT_MODEL)
    raise _missing(folder, model_def)


def _missing(folder: Path, model_def: str) -> UserError:
    there = [
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py"))
        if path.name != "__init__.py"
    ]
    near = difflib.get_close_matches(model_def, there, n=1)
    none = f"no modules in {folder.absolute()}: --model_zoo names the folder that holds them"
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(there[:8]) or none}"
    looked = shown(folder.joinpath(*model_def.split(".")).with_suffix(".py"))
    return UserError(f"--model_def {model_def}: there is no {looked}; {hint}")


def _import(folder: Path, place: _Place) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        # Modules of ElasticDL import their neighbours as model_zoo.NAME. Last, as a checkout of it also has an `elasticdl`.
        sys.path.extend([str(folder.parent), os.getcwd()])
    with blame(f"importing {place.name}", folder):
        module = importlib.import_module(place.name)
    if Path(module.__file__ or "").resolve() != place.path.resolve():
        raise UserError(
            f"{shown(place.path)} is hidden by another module of the same name, {module.__file__}: rename it"
        )
    return module


def _optional(module: ModuleType, path: Path, role: str, name: str) -> Function | None:
    asked = name != JobSpec.model_fields[role].default
    return _require(module, path, name, PARAMETERS[role]) if asked or hasattr(module, name) else None


def _require(
    module: ModuleType,
    path: Path,
    name: str,
    parameters: tuple[str, ...] | None,
    params: Mapping[str, object] = NONE,
    otherwise: str = "",
) -> Function:
    """``parameters``: None if they can't be known yet. ``params``: given by name. ``otherwise``: what would do as well."""
    expected = f"{name}(parameters) with PyTorch, {name}() with Keras"
    if parameters is not None:
        expected = f"{name}({', '.join(parameters)})"
    found: Function | None = getattr(module, name, None)
    if found is None:
        raise UserError(f"{shown(path)} has no {name}; expected {expected}{otherwise}")
    if not callable(found):
        raise UserError(f"{shown(path)}: {name} is not a function; expected {expected}")
    if parameters is not None:
        _require_signature(found, name, path, parameters, params)
    return found


def _require_signature(
    found: Function,
    name: str,
    path: Path,
    parameters: tuple[str, ...],
    params: Mapping[str, object] = NONE,
    why: str = "",
) -> None:
    try:
        signature = inspect.signature(found)
    except ValueError:  # some builtins tell nothing about themselves
        return
    try:
        signature.bind(*parameters, **params)
    except TypeError as error:
        given = [*parameters, *(f"{key}={value!r}" for key, value in params.items())]
        why = why or " for --model_params" * bool(params)
        raise UserError(
            f"{shown(path)} has {name}{signature}, which fails ({error}); expected {name}({', '.join(given)}){why}"
        ) from None
