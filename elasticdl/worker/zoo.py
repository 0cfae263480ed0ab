"""Loading a model-zoo module and checking it against the contract (docs/model_zoo.md)."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from elasticdl.callbacks import Callback
from elasticdl.common.errors import UserError
from elasticdl.common.spec import JobSpec
from elasticdl.worker.user_code import blame, shown

DEFAULT_MODEL = "custom_model"
PARAMETERS = {
    "custom_model": (),
    "loss": ("labels", "predictions"),
    "optimizer": ("parameters",),
    "dataset": ("mode", "path"),
    "eval_metrics_fn": (),
    "callbacks": (),
}

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ModelModule:
    """The functions of a model-zoo module, under the names of the contract."""

    custom_model: Function
    loss: Function
    optimizer: Function
    dataset: Function
    eval_metrics_fn: Function | None
    callbacks: Function | None
    path: Path
    folder: Path  # the zoo


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
    module = _import(folder, place)
    if place.path.name == "__init__.py" and "." in spec.model_def and not hasattr(module, place.function):
        raise _missing(folder, spec.model_def)
    return ModelModule(
        custom_model=_require(module, place.path, "custom_model", place.function),
        loss=_require(module, place.path, "loss", spec.loss),
        optimizer=_require(module, place.path, "optimizer", spec.optimizer),
        dataset=_require(module, place.path, "dataset", spec.dataset),
        eval_metrics_fn=_optional(module, place.path, "eval_metrics_fn", spec.eval_metrics_fn),
        callbacks=_optional(module, place.path, "callbacks", spec.callbacks),
        path=place.path,
        folder=folder,
    )


def make_callbacks(module: ModelModule) -> list[Callback]:
    """Raises:
    UserError: ``callbacks()`` returns something else than a list of callbacks.
    """
    callbacks = list(module.callbacks()) if module.callbacks else []
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(
                f"{shown(module.path)}: callbacks() returned a list with {type(callback).__name__}; "
                "expected objects made from elasticdl.callbacks.Callback"
            )
    return callbacks


def make_metrics(module: ModelModule) -> dict[str, Function]:
    """Raises:
    UserError: ``eval_metrics_fn()`` returns something else than functions by name.
    """
    metrics = module.eval_metrics_fn() if module.eval_metrics_fn else {}
    if not isinstance(metrics, dict) or not all(callable(metric) for metric in metrics.values()):
        raise UserError(
            f"{shown(module.path)}: eval_metrics_fn() returned {type(metrics).__name__}; "
            "expected a dict of functions (labels, outputs) by name"
        )
    return metrics


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
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(there[:8]) or 'no modules'}"
    looked = shown(folder.joinpath(*model_def.split(".")).with_suffix(".py"))
    return UserError(f"--model_def {model_def}: there is no {looked}; {hint}")


def _import(folder: Path, place: _Place) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    with blame(f"importing {place.name}", folder):
        module = importlib.import_module(place.name)
    if Path(module.__file__ or "").resolve() != place.path.resolve():
        raise UserError(
            f"{shown(place.path)} is hidden by another module of the same name, {module.__file__}: rename it"
        )
    return module


def _optional(module: ModuleType, path: Path, role: str, name: str) -> Function | None:
    asked = name != JobSpec.model_fields[role].default
    return _require(module, path, role, name) if asked or hasattr(module, name) else None


def _require(module: ModuleType, path: Path, role: str, name: str) -> Function:
    expected = f"{name}({', '.join(PARAMETERS[role])})"
    found: Function | None = getattr(module, name, None)
    if found is None:
        raise UserError(f"{shown(path)} has no {name}; expected {expected}")
    if not callable(found):
        raise UserError(f"{shown(path)}: {name} is not a function; expected {expected}")
    try:
        signature = inspect.signature(found)
    except ValueError:  # some builtins tell nothing about themselves
        return found
    try:
        signature.bind(*PARAMETERS[role])
    except TypeError as error:
        raise UserError(f"{shown(path)} has {name}{signature}, which fails ({error}); expected {expected}") from None
    return found
