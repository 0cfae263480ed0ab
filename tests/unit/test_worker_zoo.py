"""Each way in which a model-zoo module can be wrong is one line that says what, where, and what would be right."""

import uuid

import pytest
from refusal_kit import refused
from worker_kit import MODULE, function, spec_maker, write_zoo

from elasticdl.job.spec import JobSpec
from elasticdl.worker.zoo import load_module, make_callbacks, open_datasets


@pytest.fixture
def spec(tmp_path, monkeypatch):
    make = spec_maker(tmp_path, monkeypatch, model_zoo="zoo")

    def with_model(*arguments, model="", **options):
        made = make(*arguments, **options)
        return made.model_copy(update={"model_def": made.model_def + model})

    return with_model


def refusal(spec, step=load_module):
    line = refused(".", lambda: step(spec))
    name = spec.model_def.partition(".")[0]
    return line.replace(name, "NAME") if name.startswith("zoo_") else line


def opened(spec):
    return open_datasets(load_module(spec), spec)


def test_loads_the_functions_by_their_names(spec):
    extra = function("other()", "return 'other'") + function("mse(labels, predictions)", "return 0")
    module = load_module(spec(extra + function("callbacks()", "pass"), model=".other", loss="mse"))
    assert (module.custom_model(), module.loss(1, 2)) == ("other", 0)
    assert make_callbacks(module) == []
    assert module.eval_metrics_fn is not None
    without = load_module(spec(module=MODULE.replace("def eval_metrics_fn", "def something_else")))
    assert (without.eval_metrics_fn, without.callbacks) == (None, None)


def test_modules_in_folders_import_their_neighbours(tmp_path, spec):
    name = f"pack_{uuid.uuid4().hex}"
    write_zoo(tmp_path / "zoo" / name, name="parts")
    write_zoo(tmp_path / "zoo" / name, module="from .parts import *\n", name="whole")
    (tmp_path / "zoo" / name / "__init__.py").write_text("")
    assert load_module(JobSpec(model_zoo="zoo", model_def=f"{name}.whole")).path.name == "whole.py"
    line = refusal(JobSpec(model_zoo="zoo", model_def=f"{name}.whloe"))
    assert f"there is no zoo/{name}/whloe.py" in line
    assert f"did you mean {name}.whole?" in line


def without(name):
    return {"module": MODULE.replace(f"def {name}(", "def hidden(")}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (without("loss"), "zoo/NAME.py has no loss; expected loss(labels, predictions)"),
        (without("optimizer"), "zoo/NAME.py has no optimizer; expected optimizer(parameters) with PyTorch, optimizer() with Keras"),
        (without("dataset"), "zoo/NAME.py has no dataset; expected dataset(mode, path), or feed(dataset, mode, metadata)"),
        ({"eval_metrics_fn": "score"}, "zoo/NAME.py has no score; expected score()"),
        ({"model": ".net"}, "zoo/NAME.py has no net; expected net()"),
        ({"extra": "\nloss = 3\n"}, "zoo/NAME.py: loss is not a function; expected loss(labels, predictions)"),
        ({"module": "x = 1\ny = x / 0\n"}, "zoo/NAME.py:2: importing NAME raised ZeroDivisionError: division by zero"),
        ({"module": "def f(:\n"}, "zoo/NAME.py:1: importing NAME raised SyntaxError: invalid syntax"),
        ({"module": "import sys\n\nsys.exit(3)\n"}, "zoo/NAME.py:3: importing NAME raised SystemExit: 3"),
        ({"module": "raise ValueError('one\\ntwo')\n"}, "zoo/NAME.py:1: importing NAME raised ValueError: one"),
    ],
)  # fmt: skip
def test_a_module_that_can_not_be_used(spec, options, line):
    assert refusal(spec(**options)).startswith(line)


def test_a_missing_folder_or_module(tmp_path, spec, monkeypatch):
    assert "--model_zoo nowhere is not a folder" in refusal(JobSpec(model_zoo="nowhere", model_def="a"))
    there = spec()
    line = refusal(there.model_copy(update={"model_def": "absent"}))
    assert line.startswith("--model_def absent: there is no zoo/absent.py; there are zoo_")
    assert "is not MODULE[.FUNCTION]" in refusal(there.model_copy(update={"model_def": "digits/cnn.py"}))
    (tmp_path / "zoo" / "json.py").write_text(MODULE)
    line = refusal(JobSpec(model_zoo="zoo", model_def="json"))
    assert "zoo/json.py is hidden by another module of the same name" in line
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # in a pod nobody sees which folder `.` is
    line = refusal(JobSpec(model_def="digits.cnn_torch"))
    assert line.endswith(f"there are no modules in {tmp_path}/empty: --model_zoo names the folder that holds them")


PY_DATASET = "type('Own', (type('PyDataset', (list,), {}),), {})([7])"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 3", "zoo/NAME.py: dataset('training', '') returned int; expected something with len() and [index]"),
        ("return []", "dataset('training', '') has no samples; expected at least one"),
        ("return [7]", "dataset('training', '')[0] is int; expected a pair (inputs, label)"),
        ("return [(1, 2, 3)]", "dataset('training', '')[0] is tuple of 3; expected a pair (inputs, label)"),
        (f"return {PY_DATASET}", "returned a PyDataset, whose items are batches; expected single samples by index"),
        ("return {}[1]", "dataset('training', '') raised KeyError: 1"),
    ],
)
def test_a_dataset_that_cannot_be_used(spec, body, expected):
    assert expected in refusal(spec(function("dataset(mode, path)", body)), opened)


def test_evaluation_data_is_required_only_when_asked_for(spec):
    raises = "if mode == 'evaluation' and path != 'there': raise ValueError('no path')"
    body = function("dataset(mode, path)", raises, "return [(1, 2)]")
    assert opened(spec(body)).evaluation is None
    assert opened(spec(body, validation_data="there")).evaluation == [(1, 2)]
    assert "dataset('evaluation', ''): no path" in refusal(spec(body, evaluation_steps=5), opened)
    assert "dataset('evaluation', 'here'): no path" in refusal(spec(body, validation_data="here"), opened)
