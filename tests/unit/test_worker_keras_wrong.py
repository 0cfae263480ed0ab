"""Modules and data that are wrong: one line that says what, where, and what would be right, before anything starts."""

import pytest
import worker_kit
from data_kit import text
from refusal_kit import refused
from worker_keras_kit import make_job, spec_maker
from worker_kit import function

from elasticdl.common.errors import UserError
from elasticdl.worker.check import check


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """The line for a module with something added."""
    make = spec_maker(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)

    def said(*arguments, **options):
        spec = make(*arguments, **options)
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
        ("\nimport torch\nloss = torch.nn.MSELoss()\n", "MSELoss(labels, predictions), given labels float32 (10, 1) and predictions float32 (10, 1), raised "),
        (function("custom_model()", OWN.replace("\n", "\n    ") + "inputs = keras.Input((4,))", "return Own(inputs, keras.layers.Dense(1)(inputs))"), "custom_model() returned Own, which has a train_step() of its own that is not called: "),
        (KERAS_2 + function("custom_model()", "return Old()"), "returned a model of Keras 2; expected one of Keras 3: unset TF_USE_LEGACY_KERAS"),
        (KERAS_2 + function("optimizer()", "return Old()"), "optimizer() returned tf_keras's Old; expected a keras.optimizers.Optimizer"),
        # Functions that return something else.
        (function("optimizer(parameters)", "return 3"), "(missing a required argument: 'parameters'); expected optimizer() for a Keras model"),
        ("\nimport functools\noptimizer = functools.partial(str, 3)\n", "partial() returned str; expected a keras.optimizers.Optimizer"),
        (function("callbacks()", "return [3]"), "a list with int; expected objects made from elasticdl.callbacks.Callback or keras.callbacks.Callback"),
        (function("callbacks()", "return [keras.callbacks.BackupAndRestore('x')]"), "BackupAndRestore is not needed: give --checkpoint_dir"),
        (function("eval_metrics_fn()", "return"), "eval_metrics_fn() returned NoneType; expected a dict of functions (labels, outputs) by name"),
        (function("eval_metrics_fn()", "return {'a': 'accuracy'}"), "eval_metrics_fn() returned a dict whose 'a' is 'accuracy'; expected a dict"),
        (function("eval_metrics_fn()", "return {'a': {'b': 3}}"), "eval_metrics_fn() returned a dict whose 'a' is 3; expected a dict"),
        (function("eval_metrics_fn()", "return {'a': lambda labels: 1}"), "has metric 'a'(labels), which fails (too many positional arguments); expected metric 'a'(labels, outputs)"),
        # A model or a loss that does not take the data.
        (function("custom_model()", "return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])"), GIVEN.format("float32 (10, 2)") + "ValueError: "),
        (PAIR, GIVEN.format("{a: float32 (9, 2), b: float32 (9, 3)}") + "ValueError: "),
        (function("custom_model()", f"return keras.Model({OF_TWO}, x + y)") + PAIR, GIVEN.format("{a: float32 (9, 2), b: float32 (9, 3)}") + "ValueError: "),
        (function("custom_model()", TABLE) + function("dataset(mode, path)", "return [(np.array([3, 7], np.int32), np.ones(1))] * 9"), "is not in [0, 5)"),
        (function("loss(labels, predictions)", "return keras.losses.sparse_categorical_crossentropy(labels[:, None], predictions)"), "loss(labels, predictions), given labels float32 (10, 1) and predictions float32 (10, 1), raised ValueError: "),
        (function("loss(labels, predictions)", "pass"), "expected a tensor: the mean over the samples"),
    ],
)  # fmt: skip
def test_a_module_for_keras(refusal, extra, expected):
    assert expected in refusal(extra)


FEED = (
    "zoo/NAME.py: {} makes tf.data.Dataset samples, for a Keras model; expected dataset(mode, path) for a PyTorch model"
)


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (
            function("optimizer(parameters)", "import keras", "return keras.optimizers.SGD(0.1)"),
            "zoo/NAME.py: optimizer(parameters) returned keras's SGD; expected a torch.optim.Optimizer",
        ),
        (
            "\nimport keras" + function("loss(labels, outputs)", "return keras.ops.mean(labels)"),
            "loss(labels, predictions) returned EagerTensor; expected a scalar tensor: the mean over the samples",
        ),
        ("\ndel dataset" + function("feed(dataset, mode, metadata)", "return dataset"), FEED.format("feed")),
        ("\ndel dataset" + function("dataset_fn(dataset, mode)", "return dataset"), FEED.format("dataset_fn")),
    ],
)
def test_a_torch_model_with_something_of_keras(refusal, tmp_path, extra, line):
    assert refusal(extra, worker_kit.MODULE, training_data="x.csv").startswith(line)


@pytest.mark.parametrize(("body", "shown"), [("pass", "NoneType"), ("return 'mse'", "str")])
def test_a_loss_that_is_no_tensor_is_one_line_before_the_worker_joins(tmp_path, monkeypatch, body, shown):
    spec = spec_maker(tmp_path, monkeypatch)(function("loss(labels, predictions)", body))
    with pytest.raises(UserError, match=rf"loss\(labels, predictions\) returned {shown}; expected a tensor: the mean"):
        make_job(spec)


def test_parameters_that_the_model_does_not_take(refusal):
    line = refusal(model_params="units=3")
    assert line == (
        "zoo/NAME.py has custom_model(), which fails (got an unexpected keyword argument 'units'); "
        "expected custom_model(units=3) for --model_params"
    )
    assert refusal(model_params="units").startswith("--model_params: 'units' is not understood; expected NAME=VALUE")


def test_a_record_that_feed_can_not_convert(refusal, tmp_path):
    text(tmp_path / "x.csv", "a,b,y\n" + "1,2,3\n" * 20)
    feed = function(
        "feed(dataset, mode, metadata)",
        "return dataset.map(lambda record: (tf.strings.to_number(record[0] + 'x'), 0))",
    )
    assert (
        "feed(dataset, 'training', metadata): record 0 of x.csv: InvalidArgumentError: StringToNumberOp could not "
        "correctly convert string: 1x"
    ) in refusal("\nimport tensorflow as tf\n\ndel dataset\n" + feed, training_data="x.csv")


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


def test_the_users_line_in_a_subclassed_model(refusal, tmp_path):
    line = refusal(SUBCLASSED + ALONE)
    assert GIVEN.format("{wrong: float32 (9, 2)}") + "KeyError" in line
    place, number, _ = line.split(":", 2)
    (module,) = (tmp_path / "zoo").glob("*.py")
    assert place == "zoo/NAME.py"
    assert module.read_text().splitlines()[int(number) - 1].strip() == 'return self.inner(features["right"])'


@pytest.mark.parametrize(
    "extra",
    [
        function(
            "custom_model()", "return keras.Sequential([keras.Input(batch_shape=(10, 2)), keras.layers.Dense(1)])"
        ),
        function("loss(labels, predictions)", "raise NotImplementedError('only on a device of another kind')"),
    ],
)
def test_what_a_worker_may_be_able_to_do_is_not_refused(extra, tmp_path, monkeypatch):
    check(spec_maker(tmp_path, monkeypatch)(extra))
