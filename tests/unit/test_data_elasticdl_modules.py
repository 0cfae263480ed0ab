"""Modules as they are written for ElasticDL load and get their data unchanged; what can't be used is one line."""

from functools import partial

import pytest
import tensorflow as tf
from data_kit import examples, text
from refusal_kit import refused
from worker_kit import spec_maker

from elasticdl.worker.zoo import load_module, make_processor, open_datasets, open_inference, parse_params

MODULE = """
import tensorflow as tf

from elasticdl.python.common.constants import MaxComputeConfig, Mode
from elasticdl.python.common.log_utils import default_logger as logger
from elasticdl.python.data.odps_io import ODPSWriter, is_odps_configured
from elasticdl.python.elasticdl.callbacks import LearningRateScheduler
from elasticdl.python.worker.prediction_outputs_processor import BasePredictionOutputsProcessor


def custom_model(units=3):
    inputs = tf.keras.Input(shape=(2,), name="x")
    return tf.keras.Model(inputs=inputs, outputs=tf.keras.layers.Dense(units)(inputs))


def loss(labels, predictions):
    labels = tf.reshape(labels, [-1])
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(logits=predictions, labels=labels))


def optimizer(lr=0.1):
    return tf.keras.optimizers.SGD(lr)


def callbacks():
    return [LearningRateScheduler(lambda model_version: 0.1 if model_version < 5 else 0.01)]
"""

DATASET_FN = """
def dataset_fn(dataset, mode, _):
    def _parse_data(record):
        description = {"x": tf.io.FixedLenFeature([2], tf.float32)}
        if mode != Mode.PREDICTION:
            description["y"] = tf.io.FixedLenFeature([1], tf.int64)
        r = tf.io.parse_single_example(record, description)
        features = {"x": tf.cast(r["x"], tf.float32)}
        return features if mode == Mode.PREDICTION else (features, tf.cast(r["y"], tf.int32))

    dataset = dataset.map(_parse_data)
    return dataset.shuffle(buffer_size=1024) if mode == Mode.TRAINING else dataset
"""
PROCESSOR = """
class PredictionOutputsProcessor(BasePredictionOutputsProcessor):
    def process(self, predictions, worker_id):
        logger.info(predictions.numpy().tolist())
"""
FEED = """
def feed(dataset, mode, metadata):
    return dataset.map(lambda record: (tf.strings.to_number(record[0:-1]), tf.strings.to_number(record[-1], tf.int32)))
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    text(tmp_path / "x.csv", "a,b,y\n1,2,0\n3,4,1\n")
    make_spec = spec_maker(tmp_path, monkeypatch, MODULE, model_zoo="zoo")

    def load(*parts, **options):
        spec = make_spec("".join(parts), **options)
        return load_module(spec), spec

    return load


def test_a_module_predicts_from_records_without_labels_and_has_its_outputs_processed(make, tmp_path):
    examples(tmp_path / "new.tfrecord", range(5))
    given = {"task": "predict", "prediction_data": "new.tfrecord", "checkpoint_dir": "kept"}
    module, spec = make(DATASET_FN, PROCESSOR, **given)
    inputs, _ = open_inference(module, spec).__getitems__([3, 1])
    assert inputs["x"][:, 0].tolist() == [3, 1]
    make_processor(module)(tf.constant([[1.0]]), 0)


def test_a_module_over_tfrecords(make, tmp_path):
    paths = {"training_data": "train.tfrecord", "validation_data": "test.tfrecord"}
    for name, count in zip(paths.values(), (20, 5), strict=True):
        examples(tmp_path / name, range(count))
    module, spec = make(DATASET_FN, **paths, model_params="units=4")
    assert module.custom_model(**module.model_params).output_shape == (None, 4)
    data = open_datasets(module, spec)
    inputs, labels = data.training.__getitems__([3, 19, 7])
    assert sorted(labels[:, 0].tolist()) == [3, 7, 19]
    assert inputs["x"][:, 0].tolist() == labels[:, 0].tolist()
    assert data.evaluation.__getitems__([4, 0])[1].tolist() == [[4], [0]]


def test_the_scheduler_of_elasticdl_counts_steps(make):
    module, _ = make(DATASET_FN)
    model = module.custom_model(**module.model_params)
    model.compile(module.optimizer(), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    inputs, labels = tf.zeros([24, 2]), tf.zeros([24, 1], tf.int32)
    model.fit(inputs, labels, batch_size=4, epochs=1, verbose=0, callbacks=module.callbacks())
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)


def test_which_function_gives_the_data(make):
    dataset = "\ndef dataset(mode, path):\n    return [(1, 2)]\n"
    assert open_datasets(*make(FEED, dataset, training_data="x.csv")).training == [(1, 2)]
    named = make(FEED.replace("def feed", "def rows"), dataset, training_data="x.csv", feed="rows")
    assert open_datasets(*named).training[1][0].tolist() == [3, 4]


READER = """
from elasticdl.python.data.reader.data_reader import AbstractDataReader, Metadata, check_required_kwargs


class Reader(AbstractDataReader):
    def __init__(self, **kwargs):
        AbstractDataReader.__init__(self, **kwargs)
        check_required_kwargs(["rows"], kwargs)
        self.rows = kwargs["rows"]

    def read_records(self, task):
        for number in range(task.start, task.end):
            yield [str(number), task.shard_name, str(ord(task.shard.name) * 1000 + number)]

    def create_shards(self):
        return {"1": (0, self.rows), "2": (self.rows, self.rows)}

    @property
    def metadata(self):
        return Metadata(column_names=["number", "shard", "label"])


def custom_data_reader(data_origin, records_per_task=None, **kwargs):
    return Reader(**kwargs)
"""


def test_a_reader_in_the_style_of_elasticdl_and_one_with_random_access(make):
    module, spec = make(READER, FEED, training_data="anything", data_reader_params="rows=10")
    inputs, labels = open_datasets(module, spec).training.__getitems__([19, 0, 12, 11, 9, 0])
    assert inputs.tolist() == [[19, 2], [0, 1], [12, 2], [11, 2], [9, 1], [0, 1]]
    assert labels.tolist() == [50019, 49000, 50012, 50011, 49009, 49000]
    reader = '\ndef custom_data_reader(data_origin, **kwargs):\n    return [["1", "2", "7"], ["3", "4", data_origin]]\n'
    data = open_datasets(*make(reader, FEED, training_data="8"))
    assert (data.training[1][1], data.evaluation) == (8, None)


CSV = {"training_data": "x.csv"}


def reader_with(old, new):
    return READER.replace(old, new), {"training_data": "x", "data_reader_params": "rows=10"}


@pytest.mark.parametrize(
    ("part", "options", "expected"),
    [
        ("", {}, "--training_data is missing; expected the files of records for feed"),
        ("", {"training_data": "nowhere"}, "feed over --training_data nowhere: nowhere: no such file or folder"),
        ("", {**CSV, "data_reader_params": "columns=['z']"}, "x.csv: no column 'z'; its columns are"),
        ("", {"feed": "rows"}, "has no rows; expected rows(dataset, mode, metadata)"),
        ("def feed(dataset, mode, metadata): return dataset.nap()\n", CSV, "x.csv raised AttributeError"),
        (*reader_with("range(task.start, task.end)", "[]"), "read_records gave 0 records for start=9, end=10"),
        (*reader_with("return Reader(**kwargs)", "return 3"), "returned int; expected __len__ and __getitem__"),
        (*reader_with('["rows"]', '["rows", "table"]'), "these arguments are missing: table"),
    ],
)
def test_data_that_can_not_be_had_are_one_line(make, part, options, expected):
    assert expected in refused("", lambda: open_datasets(*make(FEED, part, **options)))


def test_params():
    given = "a=1; b='x;y';c=[1, 2.5, None]; d={'k': True};"
    assert parse_params("model_params", given) == {"a": 1, "b": "x;y", "c": [1, 2.5, None], "d": {"k": True}}
    assert parse_params("model_params", " ") == {}
    for wrong in ("a=relu", "a=1,b=", "print(1)", "a=__import__('os')"):
        refused("^--model_params.* is not understood.*; expected", partial(parse_params, "model_params", wrong))
