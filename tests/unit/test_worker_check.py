"""The check before a job: 0 when all is well, else 2, and a last line that says why; and the warm-up pass, which leaves nothing behind."""

import io
import random
import sys

import numpy as np
import pytest
import torch
from refusal_kit import refused
from worker_kit import KERAS_MODULE, function, spec_maker

from elasticdl.job.spec import JobSpec
from elasticdl.worker import check
from elasticdl.worker.learner import largest_micro_batch
from elasticdl.worker.torch_learner import warm_up


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


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (of_model("{}['width']"), "custom_model() raised KeyError: 'width'"),
        (function("optimizer(parameters)", "return 3"), "optimizer(parameters) returned int; expected a torch.optim.Optimizer"),
        (function("dataset(mode, path)", "raise ValueError('no such file: ' + path)"), "dataset('training', ''): no such file:"),
        (of_model("torch.nn.Linear(5, 1)"), FIRST.format("float32 (2, 2)") + "RuntimeError: mat1 and mat2 shapes cannot be"),
        (of_loss("torch.nn.functional.nll_loss(predictions, labels)"), "given labels float32 (2, 1) and predictions float32 (2, 1), raised"),
        (of_loss("(labels - predictions) ** 2"), "returned a tensor of shape (2, 1); expected a scalar tensor"),
        (of_loss("((labels - predictions) ** 2).sum()"), "the loss is a sum over the samples"),
        # What is of Keras.
        ("\nimport keras" + function("optimizer(parameters)", "return keras.optimizers.SGD(0.1)"), "optimizer(parameters) returned keras's SGD; expected a torch.optim"),
        ("\nimport keras" + of_loss("keras.ops.mean(labels)"), "returned EagerTensor; expected a scalar tensor: the mean over the samples"),
        ("\ndel dataset" + function("feed(dataset, mode, metadata)", "return dataset"), "feed makes tf.data.Dataset samples, for a Keras model; expected dataset(mode, path) for"),
    ],
)  # fmt: skip
def test_a_module_for_torch_that_is_refused(make_spec, extra, expected):
    assert expected in refused(
        "", lambda: check.check(make_spec(extra, training_data="x.csv" if "feed" in extra else ""))
    )


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
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
        (function("eval_metrics_fn()", "return {'a': lambda labels: 1}"), "metric 'a' can't be called with (labels, outputs): too many positional arguments"),
        # A model or a loss that does not take the data.
        (PAIR, FIRST.format("{a: float32 (2, 2), b: float32 (2, 3)}") + "ValueError: "),
        (function("loss(predictions)", "pass"), "given labels float32 (2, 1) and predictions float32 (2, 1), raised TypeError: loss() takes 1"),
        (function("loss(labels, predictions)", "pass"), "loss(labels, predictions) returned NoneType; expected a tensor: the mean over the samples"),
    ],
)  # fmt: skip
def test_a_module_for_keras_that_is_refused(make_spec, extra, expected):
    assert expected in refused(".", lambda: check.check(make_spec(extra, KERAS_MODULE)))


def test_parameters_that_the_model_does_not_take(make_spec):
    said = r"custom_model\(\) raised TypeError: custom_model\(\) got an unexpected keyword argument 'units'"
    for params, words in (
        ("units=3", said),
        ("units", "--model_params: 'units' is not understood; expected NAME=VALUE"),
    ):
        refused(words, lambda params=params: check.check(make_spec(model_params=params)))


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
