"""Modules and data that are wrong: one line that says what, where, and what would be right, before anything starts."""

import gzip

import pytest
import worker_kit
from data_kit import text, tfrecord
from worker_keras_kit import make_job, spec_maker

from elasticdl.common.errors import UserError
from elasticdl.worker.check import check

CSV = "a,b,y\n" + "1,2,3\n" * 20
OVER_FILES = """
import tensorflow as tf

del dataset


def numbers(record):
    values = tf.strings.to_number(record)
    return values[:2], values[2:]


def feed(dataset, mode, metadata):
    return dataset.map(numbers)
"""


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """The line for a module with something added, over files if there are any in ``data``."""
    make = spec_maker(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)

    def refused(*arguments, **options):
        spec = make(*arguments, **options)
        with pytest.raises(UserError) as caught:
            check(spec)
        line = str(caught.value)
        assert "\n" not in line
        assert "\x1b" not in line
        return line.replace(spec.model_def, "NAME")

    return refused


# -- two frameworks in one module --


def function(signature, *lines):
    return f"\n\ndef {signature}:\n    " + "\n    ".join(lines) + "\n"


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        (
            function("optimizer()", "import torch", "return torch.optim.SGD([torch.zeros(1)], 0.1)"),
            "zoo/NAME.py: optimizer() returned torch's SGD; expected a keras.optimizers.Optimizer",
        ),
        (
            "\nimport torch\nloss = torch.nn.MSELoss()\n",
            "zoo/NAME.py: MSELoss(labels, predictions), given labels float32 (10, 1) and predictions float32 (10, 1), raised ",
        ),
    ],
)
def test_a_keras_model_with_something_of_torch(refusal, extra, line):
    assert refusal(extra).startswith(line)


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
    ],
)
def test_a_torch_model_with_something_of_keras(refusal, extra, line):
    assert refusal(extra, worker_kit.MODULE).startswith(line)


def test_a_model_that_trains_in_its_own_way(refusal):
    own = "\n\nclass Own(keras.Model):\n    def train_step(self, data):\n        return {}\n"
    make = function("custom_model()", "inputs = keras.Input((4,))", "return Own(inputs, keras.layers.Dense(1)(inputs))")
    assert refusal("\nimport keras" + own + make).startswith(
        "zoo/NAME.py: custom_model() returned Own, which has a train_step() of its own that is not called: "
    )


@pytest.mark.parametrize("name", ["feed(dataset, mode, metadata)", "dataset_fn(dataset, mode)"])
def test_a_torch_model_with_a_feed(refusal, name):
    line = refusal("\ndel dataset" + function(name, "return dataset"), worker_kit.MODULE, training_data="x.csv")
    assert line == (
        f"zoo/NAME.py: {name.partition('(')[0]} makes tf.data.Dataset samples, for a Keras model; "
        "expected dataset(mode, path) for a PyTorch model"
    )


KERAS_2 = """
class Old:
    __module__ = "tf_keras.src.any"
"""


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (function("custom_model()", "return Old()"), "returned a model of Keras 2; expected one of Keras 3: unset TF_USE_LEGACY_KERAS"),
        (function("optimizer()", "return Old()"), "optimizer() returned tf_keras's Old; expected a keras.optimizers.Optimizer"),
        (function("callbacks()", "return [Old()]"), "callbacks() returned a list with Old; expected objects made from"),
    ],
)  # fmt: skip
def test_keras_2(refusal, extra, expected):
    assert expected in refusal(KERAS_2 + extra)


# -- functions that return something else --


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (function("custom_model()", "pass"), "custom_model() returned NoneType; expected a torch.nn.Module or a keras.Model"),
        (function("custom_model()", "return 3"), "custom_model() returned int; expected a torch.nn.Module or a keras.Model"),
        (function("optimizer(parameters)", "return 3"), "(missing a required argument: 'parameters'); expected optimizer() for a Keras model"),
        (function("optimizer()", "return 'adam'"), "optimizer() returned str; expected a keras.optimizers.Optimizer"),
        ("\nimport functools\noptimizer = functools.partial(str, 3)\n", "partial() returned str; expected a keras.optimizers.Optimizer"),
        (function("callbacks()", "return [3]"), "a list with int; expected objects made from elasticdl.callbacks.Callback or keras.callbacks.Callback"),
        (function("callbacks()", "return [keras.callbacks.BackupAndRestore('x')]"), "BackupAndRestore is not needed: give --checkpoint_dir"),
        (function("eval_metrics_fn()", "return"), "eval_metrics_fn() returned NoneType; expected a dict of functions (labels, outputs) by name"),
        (function("eval_metrics_fn()", "return [len]"), "eval_metrics_fn() returned list; expected a dict of functions"),
        (function("eval_metrics_fn()", "return {'a': 'accuracy'}"), "eval_metrics_fn() returned a dict whose 'a' is 'accuracy'; expected a dict"),
        (function("eval_metrics_fn()", "return {'a': {'b': 3}}"), "eval_metrics_fn() returned a dict whose 'a' is 3; expected a dict"),
        (function("eval_metrics_fn()", "return {'a': lambda labels: 1}"), "has metric 'a'(labels), which fails (too many positional arguments); expected metric 'a'(labels, outputs)"),
    ],
)  # fmt: skip
def test_what_a_function_returns(refusal, extra, expected):
    assert expected in refusal(extra)


@pytest.mark.parametrize(("body", "shown"), [("pass", "NoneType"), ("return 'mse'", "str")])
def test_a_loss_that_is_no_tensor_is_one_line_before_the_worker_joins(tmp_path, monkeypatch, body, shown):
    spec = spec_maker(tmp_path, monkeypatch)(function("loss(labels, predictions)", body))
    with pytest.raises(UserError) as caught:
        make_job(spec)
    assert str(caught.value).partition(": ")[2] == (
        f"loss(labels, predictions) returned {shown}; expected a tensor: the mean over the samples, or one value for each"
    )


def test_parameters_that_the_model_does_not_take(refusal):
    line = refusal(model_params="units=3")
    assert line == (
        "zoo/NAME.py has custom_model(), which fails (got an unexpected keyword argument 'units'); "
        "expected custom_model(units=3) for --model_params"
    )
    assert refusal(model_params="units").startswith("--model_params: 'units' is not understood; expected NAME=VALUE")


# -- feeds --


FED = "feed(dataset, 'training', metadata)"


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("None", f"{FED} returned NoneType; expected a tf.data.Dataset"),
        ("[1, 2]", f"{FED} returned list; expected a tf.data.Dataset"),
        ("(dataset, dataset, 3)", f"{FED} returned tuple; expected a tf.data.Dataset"),
        ("dataset", f"{FED} gives single tensors; expected (features, labels) pairs"),
        ("dataset.map(lambda record: {'a': record})", f"{FED} gives dicts; expected (features, labels) pairs"),
        ("dataset.map(lambda record: (record, record, record))", f"{FED} gives 3 values; expected (features, labels) pairs"),
        ("dataset.map(lambda record: metadata.nothing)", "feed over --training_data x.csv raised AttributeError: 'Metadata' object has no attribute 'nothing'"),
        ("dataset.map(lambda record: (tf.matmul(record, 3), 0))", "feed over --training_data x.csv raised TypeError: Value passed to"),
        ("dataset.map(lambda record: (tf.strings.to_number(record[0] + 'x'), 0))", f"{FED}: record 0 of x.csv: InvalidArgumentError: StringToNumberOp could not correctly convert string: 1x"),
    ],
)  # fmt: skip
def test_what_feed_returns(refusal, tmp_path, returned, expected):
    text(tmp_path / "x.csv", CSV)
    wrong = function("feed(dataset, mode, metadata)", f"return {returned}")
    assert expected in refusal(OVER_FILES + wrong, training_data="x.csv")


def test_files_that_are_wrong(refusal, tmp_path):
    def said(name, **options):
        return refusal(OVER_FILES, training_data=name, **options)

    where = "feed over --training_data"
    records = tfrecord(tmp_path / "cut.tfrecord", [b"1,2,3"] * 9)
    records.write_bytes(records.read_bytes()[:-7])
    (tmp_path / "small.csv").write_bytes(gzip.compress(CSV.encode()))
    (tmp_path / "small.tfrecord.gz").write_bytes(gzip.compress(CSV.encode()))
    text(tmp_path / "ragged.csv", "a,b,y\n1,2,3\n4,5\n6,7,8\n")
    text(tmp_path / "empty.csv", "")
    text(tmp_path / "header.csv", "a,b,y\n")
    text(tmp_path / "good.csv", CSV)
    assert "cut.tfrecord: cut short or damaged" in said("cut.tfrecord")
    for name in ("small.csv", "small.tfrecord.gz"):
        assert said(name).startswith(f"{name}: compressed, so no record can be read by itself; expected a plain file")
    assert said("ragged.csv").startswith("ragged.csv: record 1 (at byte 12) has 2 fields, expected 3;")
    for name in ("empty.csv", "header.csv"):
        assert said(name) == f"{name}: not one record in this file; expected at least one"
    assert said("good.csv", data_reader_params="columns=['a', 'z']") == (
        "good.csv: no column 'z'; its columns are a, b, y"
    )
    assert said("") == "--training_data is missing; expected the files of records for feed"
    assert said("none.csv").startswith(f"{where} none.csv: none.csv: no such file or folder")
    assert said("good.csv", validation_data="none.csv").startswith("feed over --validation_data none.csv: ")


# -- a model that does not take the data --


GIVEN = "custom_model()'s model, given the first samples of dataset('training', '') (features {}), raised ValueError: "
SUBCLASSED = """

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(1)

    def call(self, features):
        return self.inner(features["right"])
"""
ALONE = function("dataset(mode, path)", "return [({'wrong': np.ones(2, np.float32)}, np.ones(1))] * 9")
PAIR = function("dataset(mode, path)", "return [({'a': np.ones(2), 'b': np.ones(3)}, np.ones(1))] * 9")
TABLE = function(
    "custom_model()", "return keras.Sequential([keras.Input((2,), dtype='int32'), keras.layers.Embedding(5, 1)])"
) + function("dataset(mode, path)", "return [(np.array([3, 7], np.int32), np.ones(1))] * 9")


@pytest.mark.parametrize(
    ("extra", "given", "expected"),
    [
        (function("custom_model()", "return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])"), "float32 (10, 2)", ["expected", "5", "(10, 2)"]),
        (PAIR, "{a: float32 (9, 2), b: float32 (9, 3)}", ["expected", "eceived"]),
        (
            function("custom_model()", "return keras.Model({'x': (x := keras.Input((2,), name='x')), 'y': (y := keras.Input((2,), name='y'))}, x + y)") + PAIR,
            "{a: float32 (9, 2), b: float32 (9, 3)}", ["a", "b"],
        ),
    ],
)  # fmt: skip
def test_a_model_that_does_not_take_the_features(refusal, extra, given, expected):
    line = refusal(extra)
    start = "zoo/NAME.py: " + GIVEN.format(given)
    assert line.startswith(start)
    assert all(part in line.removeprefix(start) for part in expected)


def test_the_users_line_in_a_subclassed_model(refusal, tmp_path):
    line = refusal(SUBCLASSED + function("custom_model()", "return Net()") + ALONE)
    assert (
        "given the first samples of dataset('training', '') (features {wrong: float32 (9, 2)}), raised KeyError" in line
    )
    place, number, _ = line.split(":", 2)
    (module,) = (tmp_path / "zoo").glob("*.py")
    assert place == "zoo/NAME.py"
    assert module.read_text().splitlines()[int(number) - 1].strip() == 'return self.inner(features["right"])'


def test_a_value_that_the_model_does_not_take(refusal):
    line = refusal(TABLE)
    assert "custom_model()'s model, given the first samples" in line
    assert "is not in [0, 5)" in line


def test_a_loss_that_does_not_take_the_labels(refusal, tmp_path):
    wrong = function(
        "loss(labels, predictions)", "return keras.losses.sparse_categorical_crossentropy(labels[:, None], predictions)"
    )
    line = refusal(wrong)
    assert line.startswith("zoo/NAME.py:")
    assert (
        "loss(labels, predictions), given labels float32 (10, 1) and predictions float32 (10, 1), raised ValueError: "
        in line
    )
    assert "expected a tensor: the mean over the samples" in refusal(function("loss(labels, predictions)", "pass"))


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
