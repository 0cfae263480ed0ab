"""Loading a model-zoo module and checking it against the contract (docs/model_zoo.md).

And whose fault it was when the user's code raises.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, cast

from elasticdl.callbacks import Callback
from elasticdl.common.errors import ArgumentError, ElasticDLError, UserError
from elasticdl.common.reason import name_of, one_line, place, shown
from elasticdl.job.spec import EVALUATE, JobSpec
from elasticdl.triton_first import import_triton


@contextlib.contextmanager
def blame(what: str, folder: Path, otherwise: str = "") -> Iterator[None]:
    """Turn whatever the user's code raises within into one line that says where.

    ``otherwise``: the place if none below the folder was involved.
    """
    try:
        yield
    except ElasticDLError:
        raise
    except (Exception, SystemExit) as error:
        where = place(error, lambda name: _below(name, folder)) or otherwise
        raise UserError(f"{where + ': ' if where else ''}{what} raised {one_line(error)}") from error


def _below(filename: str, folder: Path) -> bool:
    return Path(filename).resolve().is_relative_to(folder.resolve())


log = logging.getLogger(__name__)

DEFAULT_MODEL = "custom_model"
# Of functions by their role, as a message shows them; the others take nothing.
EXPECTED = {
    "loss": "{0}(labels, predictions)",
    "optimizer": "{0}(parameters) with PyTorch, {0}() with Keras",
    "feed": "{0}(dataset, mode, metadata)",
    "custom_data_reader": "{0}(data_origin=...)",
    "dataset": "{0}(mode, path), or feed(dataset, mode, metadata) over the files of --training_data (docs/data.md)",
}
PARAMS = "expected NAME=VALUE; NAME=VALUE with Python literals, as in \"units=64; activation='relu'\""

# What Keras and TensorFlow read when the module imports them, unless the user has set it.
DEFAULTS = {
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # it may share its GPU
}

OWN_CALLBACKS: Mapping[str, type] = MappingProxyType({"elasticdl.callbacks.Callback": Callback})

Function = Callable[..., Any]
Metrics = Mapping[str, Any]  # by name; of a model with several outputs, by output and name

OLDER_FEED = "dataset_fn"
OPTIONS = {"training": "training_data", "evaluation": "validation_data", "prediction": "prediction_data"}


@dataclass(frozen=True, slots=True)
class FeedOpener:
    """Called as ``dataset(mode, path)``; what it returns also has ``__getitems__(indices)``, for whole batches."""

    feed: Function
    reader: Function | None  # the module's custom_data_reader
    params: Mapping[str, object]

    def __call__(self, mode: str, path: str) -> Any:
        from elasticdl.data.custom_reader import open_custom
        from elasticdl.data.open import open_records

        if not path:
            raise ArgumentError(f"--{OPTIONS[mode]} is missing; expected the files of records for {name_of(self.feed)}")
        if self.reader:
            records = open_custom(self.reader, path, mode, dict(self.params))
        else:
            records = open_records(path, self.params)
        # Imported last: TensorFlow takes seconds, and the files may be what is wrong.
        from elasticdl.data.feed import FeedDataset

        return FeedDataset(records, self.feed, mode)


@dataclass(frozen=True, slots=True)
class _Source:
    """The functions of a module, by their roles; options of the same names say what they are called."""

    module: ModuleType
    path: Path
    spec: JobSpec

    def is_asked(self, role: str) -> bool:
        """Whether an option names the function."""
        return bool(getattr(self.spec, role) != JobSpec.model_fields[role].default)

    def optional(self, role: str, name: str = "") -> Function | None:
        is_there = getattr(self.module, name or getattr(self.spec, role), None) is not None
        return self.require(role, name) if is_there or (self.is_asked(role) and not name) else None

    def require(self, role: str, name: str = "") -> Function:
        name = name or getattr(self.spec, role)
        expected = EXPECTED.get(role, "{0}()").format(name)
        found: Function | None = getattr(self.module, name, None)
        if found is None:
            raise UserError(f"{shown(self.path)} has no {name}; expected {expected}")
        if not callable(found):
            raise UserError(f"{shown(self.path)}: {name} is not a function; expected {expected}")
        return found

    def feed(self) -> FeedOpener | None:
        """Of a module that has no ``dataset``, or for which ``--feed`` names one."""
        if hasattr(self.module, self.spec.dataset) and not self.is_asked("feed"):
            return None
        feed = self.optional("feed") or self.optional("feed", OLDER_FEED)
        if feed is None:
            return None
        params = parse_params("data_reader_params", self.spec.data_reader_params)
        return FeedOpener(feed, self.optional("custom_data_reader"), params)


@dataclass(frozen=True, slots=True)
class ModelModule:
    """The functions of a model-zoo module, under the names of the contract."""

    custom_model: Function
    model_params: Mapping[str, object]  # with which to call it
    loss: Function
    optimizer: Function  # its parameters depend on the framework: see `elasticdl.worker.learner.make_optimizer`
    dataset: Function
    eval_metrics_fn: Function | None
    callbacks: Function | None
    prediction_outputs_processor: Function | None
    path: Path
    folder: Path  # the zoo

    def blame(self, what: str) -> contextlib.AbstractContextManager[None]:
        """See `blame`."""
        return blame(what, self.folder, otherwise=shown(self.path))


def load_module(spec: JobSpec) -> ModelModule:
    """Import the module that ``spec.model_def`` names below ``spec.model_zoo``; the folder goes on ``sys.path``.

    Raises:
        UserError: there is no such folder, module or function, it has another signature, or the module raises.
    """
    folder = Path(spec.model_zoo).resolve()
    if not folder.is_dir():
        raise UserError(f"--model_zoo {spec.model_zoo} is not a folder; expected the folder that holds --model_def")
    dotted, path, function = _locate(folder, spec.model_def)
    params = parse_params("model_params", spec.model_params)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    import_triton()  # the module may import TensorFlow, and then PyTorch
    module = _import(folder, dotted, path)
    if path.name == "__init__.py" and "." in spec.model_def and not hasattr(module, function):
        raise _missing(folder, spec.model_def)
    source = _Source(module, path, spec)
    return ModelModule(
        custom_model=source.require("custom_model", function),
        model_params=params,
        loss=source.require("loss"),
        optimizer=source.require("optimizer"),
        dataset=source.feed() or source.require("dataset"),
        eval_metrics_fn=source.optional("eval_metrics_fn"),
        callbacks=source.optional("callbacks"),
        prediction_outputs_processor=source.optional("prediction_outputs_processor"),
        path=path,
        folder=folder,
    )


def refuse_feed(module: ModelModule) -> None:
    """A feed makes samples for a model of Keras; this is for one that is not."""
    if isinstance(module.dataset, FeedOpener):
        raise UserError(
            f"{shown(module.path)}: {name_of(module.dataset.feed)} makes tf.data.Dataset samples, for a Keras model; "
            "expected dataset(mode, path) for a PyTorch model"
        )


def make_callbacks(module: ModelModule, kinds: Mapping[str, type] = OWN_CALLBACKS) -> list[Any]:
    """``kinds``: of what the callbacks may be, by the names that a message gives them."""
    with module.blame("callbacks()"):
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
        UserError: ``eval_metrics_fn()`` returns something else than functions by name, or one named as the loss is.
    """
    with module.blame("eval_metrics_fn()"):
        metrics = module.eval_metrics_fn() if module.eval_metrics_fn else {}
    if not isinstance(metrics, dict):
        raise _no_metrics(module, type(metrics).__name__)
    if callable(metrics.get("loss")):
        raise UserError(
            f"{shown(module.path)}: eval_metrics_fn() names a metric 'loss', as the mean of loss() is called; expected another name"
        )
    for name, found in metrics.items():
        for metric in found.values() if nested and isinstance(found, dict) else [found]:
            if not callable(metric):
                raise _no_metrics(module, f"a dict whose {name!r} is {metric!r}")
            if not isinstance(metric, type) and not hasattr(metric, "update_state"):
                _require_two_arguments(metric, f"{shown(module.path)}: metric {name!r}")
    return cast(Metrics, metrics)


def _require_two_arguments(metric: Function, name: str) -> None:
    """It is called when everything else has been paid for."""
    with contextlib.suppress(ValueError):  # some builtins tell nothing about themselves
        try:
            inspect.signature(metric).bind("labels", "outputs")
        except TypeError as error:
            raise UserError(f"{name} can't be called with (labels, outputs): {error}") from None


def _no_metrics(module: ModelModule, returned: str) -> UserError:
    return UserError(
        f"{shown(module.path)}: eval_metrics_fn() returned {returned}; "
        "expected a dict of functions (labels, outputs) by name"
    )


def _locate(folder: Path, model_def: str) -> tuple[str, Path, str]:
    """The module's dotted name and path, and the name of the function that makes the model."""
    parts = model_def.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"--model_def {model_def!r} is not MODULE[.FUNCTION], as in digits.cnn_torch")
    for count in (len(parts), len(parts) - 1):  # the longest name that is a module; what is left is the function
        base = folder.joinpath(*parts[:count])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if count and path.is_file():
                return ".".join(parts[:count]), path, ".".join(parts[count:]) or DEFAULT_MODEL
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


def _import(folder: Path, name: str, path: Path) -> ModuleType:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        # Modules of ElasticDL import their neighbours as model_zoo.NAME. Last, as a checkout of it also has an `elasticdl`.
        sys.path.extend([str(folder.parent), os.getcwd()])
    with blame(f"importing {name}", folder):
        module = importlib.import_module(name)
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise UserError(f"{shown(path)} is hidden by another module of the same name, {module.__file__}: rename it")
    return module


@dataclass(frozen=True, slots=True)
class Datasets:
    """Anything with ``__len__`` and ``__getitem__``; ``evaluation`` is None if there is nothing to evaluate on."""

    training: Any
    evaluation: Any | None


def open_datasets(module: ModelModule, spec: JobSpec) -> Datasets:
    """Open and look at both.

    Without ``--validation_data`` or ``--evaluation_steps`` nobody has asked for an evaluation: a module that has no
    data for it may say so with a ValueError, and training goes without.

    Raises:
        UserError: ``dataset()`` raised, or what it returned can't be used.
    """
    training = _open(module, "training", spec.training_data)
    asked = bool(spec.validation_data or spec.evaluation_steps)
    try:
        evaluation = _open(module, "evaluation", spec.validation_data)
    except UserError as error:
        if asked or not isinstance(error.__cause__, ValueError | OSError):
            raise
        log.warning("no evaluation: %s", error)
        evaluation = None
    return Datasets(training, evaluation)


def open_inference(module: ModelModule, spec: JobSpec) -> Any:
    """The data of an evaluation or a prediction, as pairs.

    Raises:
        UserError: as `open_datasets`.
    """
    if spec.task == EVALUATE:
        return _open(module, "evaluation", spec.validation_data)
    return InputsOnly(_open(module, "prediction", spec.prediction_data))


@dataclass(frozen=True, slots=True)
class InputsOnly:
    """A data set for a prediction, whose samples are inputs, or pairs of which the label is left out: as pairs."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return inputs_of([self.dataset[index]])[0], 0

    def __getitems__(self, indices: Sequence[int]) -> Any:
        get_many = getattr(self.dataset, "__getitems__", None)
        got = get_many(indices) if get_many else [self.dataset[index] for index in indices]
        return [(inputs, 0) for inputs in inputs_of(got)] if isinstance(got, list) else got


def inputs_of(samples: list[Any]) -> list[Any]:
    """All samples of a data set are pairs if one is."""
    return [sample[0] for sample in samples] if _is_pair(samples[0]) else samples


def _is_pair(sample: Any) -> bool:
    return isinstance(sample, tuple | list) and len(sample) == 2


def make_processor(module: ModelModule) -> Callable[[Any, int], object] | None:
    """What takes each batch of predictions, and the worker's number, if the module has it.

    Raises:
        UserError: it can't be made, or has no ``process``.
    """
    if module.prediction_outputs_processor is None:
        return None
    name = name_of(module.prediction_outputs_processor)
    with module.blame(f"{name}()"):
        processor = module.prediction_outputs_processor()
    process = getattr(processor, "process", None)
    if not callable(process):
        raise UserError(f"{shown(module.path)}: {name} has no method process(predictions, worker_id)")

    def take(predictions: Any, worker_id: int) -> None:
        with module.blame(f"{name}.process(predictions, worker_id)"):
            process(predictions, worker_id)

    return take


def _open(module: ModelModule, mode: str, path: str) -> Any:
    is_feed = isinstance(module.dataset, FeedOpener)
    call = f"feed over --{OPTIONS[mode]} {path}".rstrip() if is_feed else f"dataset({mode!r}, {path!r})"
    with module.blame(call):
        try:
            dataset = module.dataset(mode, path)
        except ValueError as error:
            if len(lines := str(error).splitlines()) != 1:
                raise
            about = f"{call}: " if path or not is_feed else ""  # without a path, a feed's line names the option itself
            raise UserError(f"{about}{lines[0]}") from error  # the contract's way to refuse a path
    where = f"{shown(module.path)}: {call}"
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(f"{where} returned {type(dataset).__name__}; expected something with len() and [index]")
    if any(kind.__name__ == "PyDataset" for kind in type(dataset).__mro__):  # Keras may not be imported
        raise UserError(f"{where} returned a PyDataset, whose items are batches; expected single samples by index")
    with module.blame(f"len of {call}"):
        samples = len(dataset)
    if samples == 0:
        raise UserError(f"{where} has no samples; expected at least one")
    with module.blame(f"{call}[0]"):
        sample = dataset[0]
    if mode != "prediction" and not _is_pair(sample):
        found = f"{type(sample).__name__}{f' of {len(sample)}' if isinstance(sample, tuple | list) else ''}"
        raise UserError(f"{where}[0] is {found}; expected a pair (inputs, label)")
    return dataset


def parse_params(option: str, text: str) -> dict[str, object]:
    """Arguments given in one option, by name, as in ``--model_params "units=64; activation='relu'"``.

    Nothing in the text is evaluated, so only literals can be given.

    Raises:
        UserError: it is something else.
    """
    params: dict[str, object] = {}
    try:
        for statement in ast.parse(text.strip().rstrip(";")).body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    params[name] = ast.literal_eval(value)
                case _:
                    raise ValueError
    except SyntaxError as error:
        raise UserError(f"--{option} {text!r} is not understood ({error.msg}); {PARAMS}") from None
    except ValueError:
        raise UserError(f"--{option}: {ast.unparse(statement)!r} is not understood; {PARAMS}") from None
    return params


# The first samples of the training data through model and loss.

FEW = 2
OF_A_DEVICE = re.compile(r"\b(CPU|CUDA|GPU)\b|not implemented for", re.IGNORECASE)


def try_first(
    module: ModelModule,
    spec: JobSpec,
    dataset: Any,
    load: Callable[[Any, int], tuple[Any, Any]],
    model: Callable[[Any], Any],
    loss: Callable[[Any, Any], Any],
) -> None:
    """Run a few of the first samples through model and loss. What only another device than this one can do is not judged.

    Raises:
        UserError: model and loss don't take a batch of the training data.
    """
    source = "--training_data" if spec.training_data else "dataset('training', '')"
    first = f"the first samples of {source}"
    try:
        with module.blame(f"putting {first} into a batch"):
            inputs, labels = load(dataset, min(FEW, len(dataset)))
        with module.blame(f"{name_of(module.custom_model)}()'s model, given {first} (features {layout(inputs)}),"):
            outputs = model(inputs)
        given = f"labels {layout(labels)} and predictions {layout(outputs)}"
        with module.blame(f"{name_of(module.loss)}(labels, predictions), given {given},"):
            loss(labels, outputs)
    except UserError as error:
        if not _is_of_the_device(error.__cause__):
            raise


def layout(value: Any) -> str:
    """Types and shapes of the tensors in a value, by name where they have one."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {layout(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(layout, value)) + ")"
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return type(value).__name__
    dtype = getattr(value.dtype, "name", None) or str(value.dtype).removeprefix("torch.")
    return f"{dtype} {tuple(value.shape)}"


def _is_of_the_device(error: BaseException | None) -> bool:
    if error is None:
        return False
    unable = isinstance(error, NotImplementedError) or type(error).__name__ == "UnimplementedError"
    return unable or bool(OF_A_DEVICE.search(one_line(error)))
