"""Each way in which a model-zoo module can be wrong is one line that says what, where, and what would be right."""

import uuid

import pytest
from data_kit import text
from refusal_kit import refused
from worker_kit import KERAS_MODULE, MODULE, function, make_job, spec_maker, write_zoo

from elasticdl.job.spec import JobSpec
from elasticdl.worker.check import check
from elasticdl.worker.zoo import load_module, make_callbacks, open_datasets


@pytest.fixture
def spec(tmp_path, monkeypatch):
    make = spec_maker(tmp_path, monkeypatch, model_zoo="zoo")

    def with_model(*arguments, model="", **options):
        made = make(*arguments, **options)
        return made.model_copy(update={"model_def": made.model_def + model})

    return with_model


def refusal(spec, step=load_module):
    line = refused("", lambda: step(spec))
    name = spec.model_def.partition(".")[0]
    return line.replace(name, "NAME") if name.startswith("zoo_") else line


def opened(spec):
    return open_datasets(load_module(spec), spec)


def test_loads_the_functions_by_their_names(spec):
    extra = function("other()", "return 'other'") + function("mse(labels, predictions)", "return 0")
    module = load_module(spec(extra + function("callbacks()", "pass"), model=".other", loss="mse"))
    assert module.custom_model() == "other"
    assert module.loss(1, 2) == 0
    assert make_callbacks(module) == []
    assert module.eval_metrics_fn is not None
    assert module.path.name.startswith("zoo_")
    without = load_module(spec(module=MODULE.replace("def eval_metrics_fn", "def something_else")))
    assert (without.eval_metrics_fn, without.callbacks) == (None, None)
    load_module(spec(function("loss(*anything)", "return") + function("optimizer(parameters, rate=0.1)", "return")))


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
        (without("dataset"), "zoo/NAME.py has no dataset; expected dataset(mode, path), or feed(dataset, mode, metadata) over the files of --training_data (docs/data.md)"),
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
    assert "did you mean" in refusal(there.model_copy(update={"model_def": there.model_def[:-1]}))
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


# -- and before a job starts, of a module for Keras --


@pytest.fixture
def of_keras(tmp_path, monkeypatch):
    return spec_maker(tmp_path, monkeypatch, KERAS_MODULE, global_batch_size=10, num_epochs=3)


@pytest.fixture
def checked(of_keras):
    """The line for a module with something added."""

    def said(*arguments, **options):
        spec = of_keras(*arguments, **options)
        line = refused("", lambda: check(spec))
        assert "\x1b" not in line
        return line.replace(spec.model_def, "NAME")

    return said


OWN = "class Own(keras.Model):\n    def train_step(self, data):\n        return {}\n"
KERAS_2 = "\n\nclass Old:\n    __module__ = 'tf_keras.src.any'\n"
GIVEN = "custom_model()'s model, given the first samples of dataset('training', '') (features {}), raised "
PAIR = function("dataset(mode, path)", "return [({'a': np.ones(2), 'b': np.ones(3)}, np.ones(1))] * 9")
OF_TWO = "{'x': (x := keras.Input((2,), name='x')), 'y': (y := keras.Input((2,), name='y'))}"
TABLE = "return keras.Sequential([keras.Input((2,), dtype='int32'), keras.layers.Embedding(5, 1)])"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        # Two frameworks in one module, or a model in another way.
        (function("optimizer()", "import torch", "return torch.optim.SGD([torch.zeros(1)], 0.1)"), "zoo/NAME.py: optimizer() returned torch's SGD; expected a keras.optimizers.Optimizer"),
        ("\nimport torch\nloss = torch.nn.MSELoss()\n", "MSELoss(labels, predictions), given labels float32 (2, 1) and predictions float32 (2, 1), raised "),
        (function("custom_model()", OWN.replace("\n", "\n    ") + "inputs = keras.Input((4,))", "return Own(inputs, keras.layers.Dense(1)(inputs))"), "custom_model() returned Own, which has a train_step() of its own that is not called: "),
        (KERAS_2 + function("custom_model()", "return Old()"), "returned a model of Keras 2; expected one of Keras 3: unset TF_USE_LEGACY_KERAS"),
        # Functions that return something else.
        (function("optimizer(parameters)", "return 3"), "zoo/NAME.py: optimizer() raised TypeError: optimizer() missing 1 required positional argument: 'parameters'"),
        ("\nimport functools\noptimizer = functools.partial(str, 3)\n", "partial() returned str; expected a keras.optimizers.Optimizer"),
        (function("callbacks()", "return [3]"), "a list with int; expected objects made from elasticdl.callbacks.Callback or keras.callbacks.Callback"),
        (function("callbacks()", "return [keras.callbacks.BackupAndRestore('x')]"), "BackupAndRestore is not needed: "),
        (function("eval_metrics_fn()", "return"), "eval_metrics_fn() returned NoneType; expected a dict of functions (labels, outputs) by name"),
        (function("eval_metrics_fn()", "return {'a': 'accuracy'}"), "eval_metrics_fn() returned a dict whose 'a' is 'accuracy'; expected a dict"),
        (function("eval_metrics_fn()", "return {'a': lambda labels: 1}"), "zoo/NAME.py: metric 'a' can't be called with (labels, outputs): too many positional arguments"),
        # A model or a loss that does not take the data.
        (function("custom_model()", "return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])"), GIVEN.format("float32 (2, 2)") + "ValueError: "),
        (PAIR, GIVEN.format("{a: float32 (2, 2), b: float32 (2, 3)}") + "ValueError: "),
        (function("custom_model()", f"return keras.Model({OF_TWO}, x + y)") + PAIR, GIVEN.format("{a: float32 (2, 2), b: float32 (2, 3)}") + "ValueError: "),
        (function("custom_model()", TABLE) + function("dataset(mode, path)", "return [(np.array([3, 7], np.int32), np.ones(1))] * 9"), "is not in [0, 5)"),
        (function("loss(labels, predictions)", "return keras.losses.sparse_categorical_crossentropy(labels[:, None], predictions)"), "loss(labels, predictions), given labels float32 (2, 1) and predictions float32 (2, 1), raised ValueError: "),
        (function("loss(labels, predictions)", "pass"), "expected a tensor: the mean over the samples"),
        (function("loss(predictions)", "pass"), "raised TypeError: loss() takes 1 positional argument but 2 were given"),
    ],
)  # fmt: skip
def test_a_module_for_keras(checked, extra, expected):
    assert expected in checked(extra)


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (function("optimizer(parameters)", "import keras", "return keras.optimizers.SGD(0.1)"), "zoo/NAME.py: optimizer(parameters) returned keras's SGD; expected a torch.optim.Optimizer"),
        ("\nimport keras" + function("loss(labels, outputs)", "return keras.ops.mean(labels)"), "loss(labels, predictions) returned EagerTensor; expected a scalar tensor: the mean over the samples"),
        ("\ndel dataset" + function("feed(dataset, mode, metadata)", "return dataset"), "zoo/NAME.py: feed makes tf.data.Dataset samples, for a Keras model; expected dataset(mode, path) for"),
    ],
)  # fmt: skip
def test_a_torch_model_with_something_of_keras(checked, tmp_path, extra, line):
    assert checked(extra, MODULE, training_data="x.csv").startswith(line)


@pytest.mark.parametrize(("body", "shown"), [("pass", "NoneType"), ("return 'mse'", "str")])
def test_a_loss_that_is_no_tensor_is_one_line_before_the_worker_joins(of_keras, body, shown):
    spec = of_keras(function("loss(labels, predictions)", body))
    refused(rf"loss\(labels, predictions\) returned {shown}; expected a tensor: the mean", lambda: make_job(spec))


def test_parameters_that_the_model_does_not_take(checked):
    line = checked(model_params="units=3")
    said = "custom_model() raised TypeError: custom_model() got an unexpected keyword argument 'units'"
    assert line == f"zoo/NAME.py: {said}"
    assert checked(model_params="units").startswith("--model_params: 'units' is not understood; expected NAME=VALUE")


def test_a_record_that_feed_can_not_convert(checked, tmp_path):
    text(tmp_path / "x.csv", "a,b,y\n" + "1,2,3\n" * 20)
    feed = function(
        "feed(dataset, mode, metadata)", "return dataset.map(lambda record: (tf.strings.to_number(record[0] + 'x'), 0))"
    )
    line = checked("\nimport tensorflow as tf\n\ndel dataset\n" + feed, training_data="x.csv")
    assert (
        "feed(dataset, 'training', metadata): record 0 of x.csv: InvalidArgumentError: StringToNumberOp could" in line
    )


SUBCLASSED = """

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(1)

    def call(self, features):
        return self.inner(features["right"])


def custom_model():
    return Net()
"""
ALONE = function("dataset(mode, path)", "return [({'wrong': np.ones(2, np.float32)}, np.ones(1))] * 9")


def test_the_users_line_in_a_subclassed_model(checked, tmp_path):
    line = checked(SUBCLASSED + ALONE)
    assert GIVEN.format("{wrong: float32 (2, 2)}") + "KeyError" in line
    place, number, _ = line.split(":", 2)
    (module,) = (tmp_path / "zoo").glob("*.py")
    assert place == "zoo/NAME.py"
    assert module.read_text().splitlines()[int(number) - 1].strip() == 'return self.inner(features["right"])'


def test_what_a_worker_may_be_able_to_do_is_not_refused(of_keras):
    extra = function("loss(labels, predictions)", "raise NotImplementedError('only on a device of another kind')")
    check(of_keras(extra))
