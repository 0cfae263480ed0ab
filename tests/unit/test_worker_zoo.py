"""Each way in which a model-zoo module can be wrong is one line that names the file and what is expected."""

import uuid

import pytest
from worker_kit import MODULE, write_zoo

from elasticdl.common.errors import UserError
from elasticdl.job.spec import JobSpec
from elasticdl.worker.zoo import load_module, make_callbacks, open_datasets


@pytest.fixture
def spec(tmp_path, monkeypatch):
    """Makes a zoo of one module, which is MODULE with something added or something else."""
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    monkeypatch.chdir(tmp_path)

    def make(extra="", module=MODULE, function="", **options):
        name = f"zoo_{uuid.uuid4().hex}"
        write_zoo(tmp_path / "zoo", extra, module, name)
        return JobSpec(model_zoo="zoo", model_def=name + function, **options)

    return make


def refusal(spec, step=load_module):
    with pytest.raises(UserError) as caught:
        step(spec)
    line = str(caught.value)
    assert "\n" not in line
    name = spec.model_def.partition(".")[0]
    return line.replace(name, "NAME") if name.startswith("zoo_") else line


def opened(spec):
    return open_datasets(load_module(spec), spec)


def test_loads_the_functions_by_their_names(spec):
    extra = "\ndef other():\n    return 'other'\ndef mse(labels, predictions):\n    return 0\ndef callbacks():\n    return []\n"
    module = load_module(spec(extra, function=".other", loss="mse"))
    assert module.custom_model() == "other"
    assert module.loss(1, 2) == 0
    assert module.callbacks is not None
    assert module.eval_metrics_fn is not None
    assert module.path.name.startswith("zoo_")


def test_optional_functions_may_be_missing(spec):
    module = load_module(spec(module=MODULE.replace("def eval_metrics_fn", "def something_else")))
    assert module.eval_metrics_fn is None
    assert module.callbacks is None


def test_modules_in_folders_import_their_neighbours(tmp_path, spec):
    name = f"pack_{uuid.uuid4().hex}"
    write_zoo(tmp_path / "zoo" / name, name="parts")
    write_zoo(tmp_path / "zoo" / name, module="from .parts import *\n", name="whole")
    (tmp_path / "zoo" / name / "__init__.py").write_text("")
    assert load_module(JobSpec(model_zoo="zoo", model_def=f"{name}.whole")).path.name == "whole.py"
    line = refusal(JobSpec(model_zoo="zoo", model_def=f"{name}.whloe"))
    assert f"there is no zoo/{line.split('zoo/')[1].split('/')[0]}/whloe.py" in line
    assert "did you mean" in line
    assert ".whole?" in line


@pytest.mark.parametrize("name", ["loss", "optimizer", "dataset", "custom_model"])
def test_a_missing_function(spec, name):
    expected = {
        "loss": "loss(labels, predictions)",
        "optimizer": "optimizer(parameters) with PyTorch, optimizer() with Keras",
        "dataset": "dataset(mode, path), or feed(dataset, mode, metadata) over the files of --training_data (docs/data.md)",
        "custom_model": "custom_model()",
    }[name]
    line = refusal(spec(module=MODULE.replace(f"def {name}(", "def hidden(")))
    assert line == f"zoo/NAME.py has no {name}; expected {expected}"


def test_a_missing_function_that_an_option_names(spec):
    assert refusal(spec(eval_metrics_fn="score")) == "zoo/NAME.py has no score; expected score()"
    assert refusal(spec(function=".net")) == "zoo/NAME.py has no net; expected net()"


def test_another_signature(spec):
    line = refusal(spec("\ndef loss(predictions):\n    return 0\n"))
    assert line.startswith("zoo/NAME.py has loss(predictions), which fails (too many positional arguments)")
    assert line.endswith("expected loss(labels, predictions)")
    assert refusal(spec("\nloss = 3\n")) == "zoo/NAME.py: loss is not a function; expected loss(labels, predictions)"


def test_defaults_and_variadic_parameters_are_fine(spec):
    load_module(spec("\ndef loss(*anything):\n    return 0\ndef optimizer(parameters, rate=0.1):\n    return 0\n"))


def test_a_missing_folder_or_module(tmp_path, spec):
    assert "--model_zoo nowhere is not a folder" in refusal(JobSpec(model_zoo="nowhere", model_def="a"))
    there = spec()
    line = refusal(there.model_copy(update={"model_def": "absent"}))
    assert line.startswith("--model_def absent: there is no zoo/absent.py; there are zoo_")
    assert "did you mean" in refusal(there.model_copy(update={"model_def": there.model_def[:-1]}))
    assert "is not MODULE[.FUNCTION]" in refusal(there.model_copy(update={"model_def": "digits/cnn.py"}))


def test_a_folder_without_modules_is_told_by_its_whole_path(tmp_path, monkeypatch):
    """In a pod nobody sees which folder `.` is."""
    monkeypatch.chdir(tmp_path)
    line = refusal(JobSpec(model_def="digits.cnn_torch"))
    assert line.endswith(f"there are no modules in {tmp_path}: --model_zoo names the folder that holds them")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("x = 1\ny = x / 0\n", "zoo/NAME.py:2: importing NAME raised ZeroDivisionError: division by zero"),
        ("import no_such_thing\n", "zoo/NAME.py:1: importing NAME raised ModuleNotFoundError: No module named"),
        ("def f(:\n", "zoo/NAME.py:1: importing NAME raised SyntaxError: invalid syntax"),
        ("import sys\n\nsys.exit(3)\n", "zoo/NAME.py:3: importing NAME raised SystemExit: 3"),
        ("raise ValueError('one\\ntwo')\n", "zoo/NAME.py:1: importing NAME raised ValueError: one"),
    ],
)
def test_a_module_that_raises_at_import(spec, module, expected):
    assert refusal(spec(module=module)).startswith(expected)


def test_a_module_hidden_by_another(tmp_path, monkeypatch, spec):
    spec()
    (tmp_path / "zoo" / "json.py").write_text(MODULE)
    line = refusal(JobSpec(model_zoo="zoo", model_def="json"))
    assert "zoo/json.py is hidden by another module of the same name" in line


def dataset(body):
    return f"\ndef dataset(mode, path):\n    {body}\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 3", "zoo/NAME.py: dataset('training', '') returned int; expected something with len() and [index]"),
        ("return []", "zoo/NAME.py: dataset('training', '') has no samples; expected at least one"),
        ("return [7]", "zoo/NAME.py: dataset('training', '')[0] is int; expected a pair (inputs, label)"),
        (
            "return [(1, 2, 3)]",
            "zoo/NAME.py: dataset('training', '')[0] is tuple of 3; expected a pair (inputs, label)",
        ),
        (
            "return type('Own', (type('PyDataset', (list,), {}),), {})([7])",
            "zoo/NAME.py: dataset('training', '') returned a PyDataset, whose items are batches; expected single samples by index",
        ),
        ("raise ValueError('no data at ' + path)", "dataset('training', ''): no data at "),
        ("return {}[1]", "dataset('training', '') raised KeyError: 1"),
    ],
)
def test_a_dataset_that_cannot_be_used(spec, body, expected):
    assert expected in refusal(spec(dataset(body)), opened)


def test_evaluation_data_is_required_only_when_asked_for(spec):
    body = "if mode == 'evaluation' and path != 'there': raise ValueError('no path')\n    return [(1, 2)]"
    assert opened(spec(dataset(body))).evaluation is None
    assert opened(spec(dataset(body), validation_data="there")).evaluation == [(1, 2)]
    assert "dataset('evaluation', ''): no path" in refusal(spec(dataset(body), evaluation_steps=5), opened)
    assert "dataset('evaluation', 'here'): no path" in refusal(spec(dataset(body), validation_data="here"), opened)


def test_callbacks_may_be_none(spec):
    assert make_callbacks(load_module(spec("\ndef callbacks():\n    pass\n"))) == []


def test_callbacks_must_be_callbacks(spec):
    module = load_module(spec("\ndef callbacks():\n    return [print]\n"))
    with pytest.raises(UserError, match=r"callbacks\(\) returned a list with builtin_function_or_method; expected"):
        make_callbacks(module)
