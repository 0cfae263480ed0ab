"""The check before a job: 0 when all is well, else 2, and a last line that says why; and the warm-up pass, which leaves nothing behind."""

import io
import random
import sys
import uuid

import numpy as np
import pytest
import torch
from refusal_kit import refused
from worker_kit import KERAS_MODULE, MODULE, function, spec_maker, write_zoo

from elasticdl.job.spec import JobSpec
from elasticdl.worker import check
from elasticdl.worker.learner import largest_micro_batch
from elasticdl.worker.torch_learner import warm_up
from elasticdl.worker.zoo import load_module, make_callbacks, open_datasets


@pytest.fixture
def make_spec(monkeypatch, tmp_path):
    return spec_maker(tmp_path, monkeypatch)


@pytest.fixture
def run(make_spec, monkeypatch, capfd):
    """Checks a module with something added; gives exit code, stdout and stderr."""

    def checked(extra="", **options):
        monkeypatch.setattr("sys.stdin", io.StringIO(make_spec(extra, **options).to_json()))
        code = check.main()
        said = capfd.readouterr()
        return code, said.out, said.err

    return checked


NOISE = (
    "\nimport os, sys\nprint('out')\nprint('err', file=sys.stderr)\nos.write(1, b'raw out')\nos.write(2, b'raw err')\n"
)
RELUCTANT = """
class Reluctant(torch.nn.Linear):
    def forward(self, inputs):
        if {}:
            raise {}
        return super().forward(inputs)


def custom_model():
    return Reluctant(2, 1)
"""


def test_what_the_module_prints_comes_before_the_line(run):
    assert run(NOISE) == (0, "out\nraw out", "err\nraw err")
    code, out, err = run(NOISE + function("custom_model()", "return 3"))
    noise, line = err.rstrip("\n").rsplit("\n", 1)
    assert (code, out, noise) == (2, "out\nraw out", "err\nraw err")
    assert "custom_model() returned int; expected" in line


@pytest.mark.parametrize(
    "extra",
    [
        RELUCTANT.format("not self.training", "ValueError('only in training')"),
        RELUCTANT.format("True", "NotImplementedError('not here')"),
        RELUCTANT.format("True", "RuntimeError('Expected all tensors to be on the same device, but found cuda:0!')"),
    ],
)
def test_what_a_worker_may_be_able_to_do_is_not_refused(run, extra):
    assert run(extra) == (0, "", "")


def of_loss(body):
    return function("loss(labels, predictions)", f"return {body}")


def of_model(body):
    return function("custom_model()", f"return {body}")


FIRST = "custom_model()'s model, given the first samples of dataset('training', '') (features {}), raised "
OWN = "class Own(keras.Model):\n    def train_step(self, data):\n        return {}\n"
KERAS_2 = "\n\nclass Old:\n    __module__ = 'tf_keras.src.any'\n"
PAIR = function("dataset(mode, path)", "return [({'a': np.ones(2), 'b': np.ones(3)}, np.ones(1))] * 9")


def of_data(*body):
    return function("dataset(mode, path)", *body)


def without(name):
    return {"module": MODULE.replace(f"def {name}(", "def hidden(")}


PY_DATASET = "type('Own', (type('PyDataset', (list,), {}),), {})([7])"
REFUSED = [
    # What is missing, or can't be imported.
    (without("loss"), "has no loss; expected loss(labels, predictions)"),
    (without("optimizer"), "has no optimizer; expected optimizer(parameters) with PyTorch, optimizer() with Keras"),
    (without("dataset"), "has no dataset; expected dataset(mode, path), or feed(dataset, mode, metadata)"),
    ({"eval_metrics_fn": "score"}, "has no score; expected score()"),
    ("\nloss = 3\n", "loss is not a function; expected loss(labels, predictions)"),
    ({"module": "x = 1\ny = x / 0\n"}, "raised ZeroDivisionError: division by zero"),
    ({"module": "def f(:\n"}, "raised SyntaxError: invalid syntax"),
    ({"module": "import sys\n\nsys.exit(3)\n"}, "raised SystemExit: 3"),
    ({"module": "raise ValueError('one\\ntwo')\n"}, "raised ValueError: one"),
    # Data.
    (of_data("return 3"), "dataset('training', '') returned int; expected something with len() and [index]"),
    (of_data("return []"), "dataset('training', '') has no samples; expected at least one"),
    (of_data("return [7]"), "dataset('training', '')[0] is int; expected a pair (inputs, label)"),
    (of_data("return [(1, 2, 3)]"), "dataset('training', '')[0] is tuple of 3; expected a pair (inputs, label)"),
    (of_data(f"return {PY_DATASET}"), "returned a PyDataset, whose items are batches; expected single samples by index"),
    (of_data("return {}[1]"), "dataset('training', '') raised KeyError: 1"),
    (of_data("raise ValueError('no such file: ' + path)"), "dataset('training', ''): no such file:"),
    # A module for PyTorch.
    ({"model_params": "units=3"}, "custom_model() got an unexpected keyword argument 'units'"),
    ({"model_params": "units"}, "--model_params: 'units' is not understood; expected NAME=VALUE"),
    (of_model("{}['width']"), "custom_model() raised KeyError: 'width'"),
    (function("optimizer(parameters)", "return 3"), "optimizer(parameters) returned int; expected a torch.optim.Optimizer"),
    (of_model("torch.nn.Linear(5, 1)"), FIRST.format("float32 (2, 2)") + "RuntimeError: mat1 and mat2 shapes cannot be"),
    (of_loss("torch.nn.functional.nll_loss(predictions, labels)"), "given labels float32 (2, 1) and predictions float32 (2, 1), raised"),
    (of_loss("(labels - predictions) ** 2"), "returned a tensor of shape (2, 1); expected a scalar tensor"),
    (of_loss("((labels - predictions) ** 2).sum()"), "the loss is a sum over the samples"),
    # What is of Keras.
    ("\nimport keras" + function("optimizer(parameters)", "return keras.optimizers.SGD(0.1)"), "optimizer(parameters) returned keras's SGD; expected a torch.optim"),
    ("\nimport keras" + of_loss("keras.ops.mean(labels)"), "returned EagerTensor; expected a scalar tensor: the mean over the samples"),
    ({"extra": "\ndel dataset" + function("feed(dataset, mode, metadata)", "return dataset"), "training_data": "x.csv"}, "feed makes tf.data.Dataset samples, for a Keras model; expected dataset(mode, path) for"),
]  # fmt: skip
OF_KERAS = [
    # Two frameworks in one module, or a model in another way.
    (function("optimizer()", "import torch", "return torch.optim.SGD([torch.zeros(1)], 0.1)"), "optimizer() returned torch's SGD; expected a keras.optimizers.Optimizer"),
    (function("custom_model()", OWN.replace("\n", "\n    ") + "inputs = keras.Input((4,))", "return Own(inputs, keras.layers.Dense(1)(inputs))"), "custom_model() returned Own, which has a train_step() of its own that is not called: "),
    (KERAS_2 + of_model("Old()"), "returned a model of Keras 2; expected one of Keras 3: unset TF_USE_LEGACY_KERAS"),
    # Functions that return something else.
    ("\nimport functools\noptimizer = functools.partial(str, 3)\n", "partial() returned str; expected a keras.optimizers.Optimizer"),
    (function("callbacks()", "return [3]"), "a list with int; expected objects made from elasticdl.callbacks.Callback or keras.callbacks.Callback"),
    (function("callbacks()", "return [keras.callbacks.BackupAndRestore('x')]"), "BackupAndRestore is not needed: "),
    (function("eval_metrics_fn()", "return"), "eval_metrics_fn() returned NoneType; expected a dict of functions (labels, outputs) by name"),
    (function("eval_metrics_fn()", "return {'a': 'accuracy'}"), "returned a dict whose 'a' is 'accuracy'; expected a dict"),
    (function("eval_metrics_fn()", "return {'loss': lambda labels, outputs: 1}"), "names a metric 'loss', as the mean of loss() is called; expected another name"),
    (function("eval_metrics_fn()", "return {'a': lambda labels: 1}"), "metric 'a' can't be called with (labels, outputs): too many positional arguments"),
    # A model or a loss that does not take the data.
    (PAIR, FIRST.format("{a: float32 (2, 2), b: float32 (2, 3)}") + "ValueError: "),
    (function("loss(predictions)", "pass"), "given labels float32 (2, 1) and predictions float32 (2, 1), raised TypeError: loss() takes 1"),
    (function("loss(labels, predictions)", "pass"), "loss(labels, predictions) returned NoneType; expected a tensor: the mean over the samples"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "given", "expected"), [*((MODULE, *row) for row in REFUSED), *((KERAS_MODULE, *row) for row in OF_KERAS)]
)
def test_a_module_that_is_refused(make_spec, module, given, expected):
    spec = make_spec(**{"module": module, **({"extra": given} if isinstance(given, str) else given)})
    assert expected in refused(".", lambda: check.check(spec))


def test_refuses_what_horovod_cannot_bear_and_says_where_it_is_missing(make_spec, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setenv("HOROVOD_CYCLE_TIME", "1")
        refused("unset HOROVOD_CYCLE_TIME", lambda: check.check(make_spec()))
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    said = refused("Horovod with PyTorch is needed", lambda: check.check(make_spec(collective="horovod")))
    assert "--collective torch does without" in said
    check.check(make_spec())  # torch is taken where it is not asked for


def test_refuses_a_second_history_in_one_folder(make_spec, tmp_path):
    (tmp_path / "checkpoint-0000000007.pt").write_bytes(b"")
    folder = {"checkpoint_dir": str(tmp_path)}
    check.check(make_spec(**folder))
    earlier = "holds checkpoints of an earlier training, up to step 7"
    refused(earlier, lambda: check.check(make_spec(**folder, resume=False)))


# -- loading --


def refusal(spec, step=load_module):
    return refused(".", lambda: step(spec))


def opened(spec):
    return open_datasets(load_module(spec), spec)


def test_loads_the_functions_by_their_names(make_spec):
    extra = function("other()", "return 'other'") + function("mse(labels, predictions)", "return 0")
    spec = make_spec(extra + function("callbacks()", "pass"), loss="mse")
    module = load_module(spec.model_copy(update={"model_def": spec.model_def + ".other"}))
    assert (module.custom_model(), module.loss(1, 2)) == ("other", 0)
    assert make_callbacks(module) == []
    assert module.eval_metrics_fn is not None
    without = load_module(make_spec(module=MODULE.replace("def eval_metrics_fn", "def something_else")))
    assert (without.eval_metrics_fn, without.callbacks) == (None, None)


def test_modules_in_folders_import_their_neighbours(tmp_path, make_spec):
    name = f"pack_{uuid.uuid4().hex}"
    write_zoo(tmp_path / "zoo" / name, name="parts")
    write_zoo(tmp_path / "zoo" / name, module="from .parts import *\n", name="whole")
    (tmp_path / "zoo" / name / "__init__.py").write_text("")
    assert load_module(JobSpec(model_zoo="zoo", model_def=f"{name}.whole")).path.name == "whole.py"
    line = refusal(JobSpec(model_zoo="zoo", model_def=f"{name}.whloe"))
    assert f"there is no zoo/{name}/whloe.py" in line
    assert f"did you mean {name}.whole?" in line


def test_a_missing_folder_or_module(tmp_path, make_spec, monkeypatch):
    assert "--model_zoo nowhere is not a folder" in refusal(JobSpec(model_zoo="nowhere", model_def="a"))
    there = make_spec()
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


def test_evaluation_data_is_required_only_when_asked_for(make_spec):
    raises = "if mode == 'evaluation' and path != 'there': raise ValueError('no path')"
    body = of_data(raises, "return [(1, 2)]")
    assert opened(make_spec(body)).evaluation is None
    assert opened(make_spec(body, validation_data="there")).evaluation == [(1, 2)]
    assert "dataset('evaluation', ''): no path" in refusal(make_spec(body, evaluation_steps=5), opened)
    assert "dataset('evaluation', 'here'): no path" in refusal(make_spec(body, validation_data="here"), opened)


# -- the warm-up pass --


class DrawnSamples:
    """Draws from every global generator, as augmentation does."""

    def __getitem__(self, index):
        return torch.rand(3) + np.random.rand() + random.random(), torch.tensor([1.0])


class SeenShapes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        self.seen = []

    def forward(self, inputs):
        self.seen.append(inputs.shape)
        return self.layers(inputs).sum(dim=1, keepdim=True)


def drawn(between=lambda: None):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    between()
    return random.random(), np.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize("loss", [torch.nn.functional.mse_loss, lambda labels, predictions: {}["no"]])
def test_leaves_no_trace_also_when_the_users_code_raises(loss):
    model, gradients = SeenShapes(), []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.layers[0].weight.register_hook(gradients.append)

    def warm():
        try:
            warm_up(model, loss, DrawnSamples(), 6, torch.device("cpu"))
        except KeyError:
            gradients.append("raised")

    assert drawn(warm) == drawn()
    assert model.seen == [(6, 3)]
    assert len(gradients) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "samples", "expected"),
    [
        ({"global_batch_size": 100, "max_worker_batch_size": 30}, 1000, 30),
        ({"global_batch_size": 100, "num_workers": "3-4"}, 1000, 34),
        ({"minibatch_size": 20}, 1000, 20),
        ({"minibatch_size": 20, "max_worker_batch_size": 8}, 1000, 8),
        ({}, 1000, 64),
        ({}, 10, 10),
    ],
)
def test_runs_as_many_samples_as_training_will(options, samples, expected):
    assert largest_micro_batch(JobSpec(**options), samples) == expected
