"""Records by index over files of each format, and ``feed`` over just those of a micro-batch; one line for each way to be wrong."""

import csv
import gzip
import os
import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import fsspec
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from refusal_kit import refused
from tensorflow.train import Example, Feature, Features, FloatList, Int64List
from worker_kit import spec_maker

from elasticdl.common.crc32c import masked_crc32c
from elasticdl.common.errors import ArgumentError, UserError
from elasticdl.data import Arrays
from elasticdl.data import tfrecord as tfrecord_module
from elasticdl.data.custom_reader import open_custom
from elasticdl.data.feed import FeedDataset
from elasticdl.data.open import open_records
from elasticdl.data.storage import MOST_OPEN, Storage, find_files
from elasticdl.worker.zoo import load_module, make_processor, open_datasets, open_inference, parse_params


def tfrecord(path, records):
    def framed(record):
        length = struct.pack("<Q", len(record))
        return length + struct.pack("<I", masked_crc32c(length)) + record + struct.pack("<I", masked_crc32c(record))

    path.write_bytes(b"".join(map(framed, records)))
    return path


def example_file(path, numbers):
    """TensorFlow's, with two features ``x`` and a label ``y``."""

    def example(number):
        x, y = Feature(float_list=FloatList(value=[number, -number])), Feature(int64_list=Int64List(value=[number]))
        return Example(features=Features(feature={"x": x, "y": y})).SerializeToString()

    return tfrecord(path, map(example, numbers))


def text(path, content):
    path.write_bytes(content.encode())
    return path


def refusal(where, error=UserError, **params):
    """The line for files that can't be read."""

    def read():
        records = open_records(str(where), params)
        records.read(range(len(records)))

    return refused("", read, error)


def test_a_path_is_a_file_a_folder_a_glob_or_several(tmp_path):
    for name in ("b.csv", "a.csv", "sub/c.csv", "_SUCCESS", ".hidden.csv", "_temporary/d.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")
    found = {"": ["a.csv", "b.csv", "sub/c.csv"], "/*.csv": ["a.csv", "b.csv"]}
    found[f"/sub, {tmp_path}/a.csv"] = ["sub/c.csv", "a.csv"]
    for path, names in found.items():
        assert find_files(f"{tmp_path}{path}") == [f"{tmp_path}/{name}" for name in names]


def test_a_path_that_names_nothing(tmp_path):
    for path in (f"{tmp_path}/nothing", f"{tmp_path}/*.csv", ""):
        assert "expected files, folders, globs or URLs" in refusal(path, ArgumentError)
    assert refusal("nosuch://bucket/x").startswith("nosuch://bucket/x: can't be listed: Protocol not known")


def test_tfrecords_by_index_over_several_files(tmp_path):
    tfrecord(tmp_path / "a.tfrecord", [b"zero", b"", b"two" * 1000])
    tfrecord(tmp_path / "b.tfrecord", [])
    tfrecord(tmp_path / "c.tfrecord-00000-of-00001", [b"three"])
    tfrecord(tmp_path / "part-0", [b"four"])  # told by its beginning
    records = open_records(str(tmp_path), {})
    assert len(records) == 5
    assert records.read([3, 0, 4, 2, 1, 0]).tolist() == [b"three", b"zero", b"four", b"two" * 1000, b"", b"zero"]
    assert records.place(3) == f"record 0 of {tmp_path}/c.tfrecord-00000-of-00001"


def test_the_index_is_the_one_of_tensorflow(tmp_path):
    written = [os.urandom(size) for size in (0, 1, 70000, 12)]
    with tf.io.TFRecordWriter(str(tmp_path / "x.tfrecord")) as writer:
        for record in written:
            writer.write(record)
    assert open_records(str(tmp_path), {}).read(range(4)).tolist() == written


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=20), data=st.data())
def test_any_cut_of_a_tfrecord_file_but_between_records_is_found(tmp_path_factory, sizes, data):
    path = tfrecord(tmp_path_factory.mktemp("cut") / "x.tfrecord", [b"x" * size for size in sizes])
    borders = np.cumsum([size + 16 for size in sizes]).tolist()
    cut = data.draw(st.integers(1, borders[-1] - 1).filter(lambda end: end not in borders))
    path.write_bytes(path.read_bytes()[:cut])
    whole = sum(border < cut for border in borders)
    place = f"the record at byte {[0, *borders][whole]:,} (number {whole:,}) goes beyond the end of the file, {cut:,};"
    assert (f"cut short or damaged: {place}" if cut >= 12 else "not a TFRecord file") in refusal(path)


@pytest.mark.parametrize("sizes", [[0], [5, 0, 7] * 20, [1000, 3, 84, 3, 500], [72, 72, 84, 73]])
def test_a_remote_tfrecord_file_is_indexed_by_windows(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(tfrecord_module, "WINDOW_BYTES", 100)
    content, memory = tfrecord(tmp_path / "local", map(bytes, sizes)).read_bytes(), fsspec.filesystem("memory")
    memory.pipe({"/windows/x.tfrecord": content, "/cut/x.tfrecord": content[:-1]})
    records = open_records("memory://windows/x.tfrecord", {})
    assert [len(record) for record in records.read(range(len(records)))] == sizes
    assert "cut short or damaged: the record at byte " in refusal("memory://cut/x.tfrecord")


ZIPPED = gzip.compress(b"x" * 100, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.tfrecord", b"something else, long enough", "not a TFRecord file: its first 12 bytes are no length"),
        *((name, ZIPPED, "compressed, so no record can be read by itself") for name in ("b.tfrecord", "c.csv")),
        # Without a suffix a file is told by its beginning.
        ("part-0", b"\x04\x03\x02\x01" + bytes(20), "a RecordIO file; expected a TFRecord"),
        ("part-0", b"what is this, then?", "of no known format; expected .tfrecord,"),
        ("x.parquet", b"PAR1\x15\x04\x15\x80" + bytes(20), "or a module whose dataset(mode, path) reads it"),
        ("x.csv", b"a,b\n1,2\n3", "x.csv: record 1 (at byte 8) has 1 fields, expected 2; is the file cut short"),
        ("x.csv", b'a,b\n1,"2', "ends within a quoted field"),
        *(("x.csv", content, "not one record in this file; expected at least one") for content in (b"x\n", b"")),
    ],
)
def test_files_that_are_wrong(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert expected in refusal(tmp_path / name)


def test_files_that_do_not_fit_together(tmp_path):
    text(tmp_path / "b.csv", "a\n")
    text(tmp_path / "a.csv", "b\n1\n")
    assert "b.csv: columns ['a'], but" in refusal(tmp_path)
    tfrecord(tmp_path / "b.tfrecord", [b"1"])
    assert "b.tfrecord: of another format than" in refusal(tmp_path)


def test_csv_by_index(tmp_path):
    text(tmp_path / "a.csv", '\ufeffage,job,income\r\n1,"a, ""b""\nc",x\r\n\r\n2,,y\r\n')
    text(tmp_path / "b.csv", "age,job,income\n3,ü,")
    text(tmp_path / "c.csv", "")
    text(tmp_path / "d.csv", "age,job,income\n")
    records = open_records(str(tmp_path), {})
    assert records.metadata.column_names == ["age", "job", "income"]
    rows = [[b"1", b'a, "b"\nc', b"x"], [b"2", b"", b"y"], [b"3", "ü".encode(), b""]]
    assert records.read([2, 1, 0]).tolist() == rows[::-1]


def test_columns_separator_and_header_can_be_said(tmp_path):
    text(tmp_path / "a.csv", "1;2;3\n4;5;6\n")
    named, chosen = ({"header": False, "columns": ["x", "y", "z"]}, {"columns": ["3", "1"]})
    records = open_records(str(tmp_path), {"sep": ";", **named})
    assert (records.metadata.column_names, records.read([1]).tolist()) == (["x", "y", "z"], [[b"4", b"5", b"6"]])
    assert open_records(str(tmp_path), {"sep": ";", **chosen}).read([0]).tolist() == [[b"6", b"4"]]


FIELDS = st.text(st.sampled_from('a,"\n\r é'), max_size=4)


@given(rows=st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=8), size=st.integers(1, 9))
def test_csv_reads_what_the_csv_module_writes_across_chunks(tmp_path_factory, rows, size):
    path = tmp_path_factory.mktemp("csv") / "x.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["a", "b"], *rows])
    chunks = Storage.chunks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "chunks", lambda self, name: chunks(self, name, size))
        records = open_records(str(path), {})
        read = [tuple(field.decode() for field in row) for row in records.read(range(len(rows))).tolist()]
    assert (len(records), read) == (len(rows), rows)


def test_text_by_line(tmp_path):
    text(tmp_path / "x.txt", 'one\r\ntwo, "2\n\nthree')
    assert open_records(str(tmp_path), {}).read([2, 1, 0]).tolist() == [b"three", b'two, "2', b"one"]
    text(tmp_path / "x.csv", "1,2\n")
    assert open_records(str(tmp_path / "x.csv"), {"reader_type": "Text"}).read([0]).tolist() == [b"1,2"]


def test_arrays_are_batches_in_the_order_that_is_asked_for():
    inputs, labels = {"x": np.arange(8).reshape(4, 2), "y": np.arange(4) * 10}, np.arange(4) + 100
    arrays = Arrays(inputs, labels, transform=lambda batch: {"x": batch["x"] + 1, "y": batch["y"]})
    batch, found = arrays.__getitems__([3, 0])
    assert (batch["x"].tolist(), batch["y"].tolist(), found.tolist()) == ([[7, 8], [1, 2]], [30, 0], [103, 100])
    sample, label = arrays[2]
    assert (sample["x"].tolist(), sample["y"], label, len(arrays)) == ([5, 6], 20, 102, 4)
    refused("inputs y: 4 rows, but there are 3 labels", lambda: Arrays({"y": labels}, labels[:3]), ValueError)


def test_what_is_not_there_is_refused(tmp_path):
    path = text(tmp_path / "a.csv", "x\n1\n2\n")
    assert "--data_reader_params: unknown colums; expected reader_type, columns" in refusal(path, colums=["x"])
    assert "--data_reader_params: sep=3" in refusal(path, sep=3)
    assert "no column 'age'; its columns are x" in refusal(path, columns=["age"])
    with pytest.raises(IndexError):
        open_records(str(path), {}).read([2])


def test_a_file_that_shrinks_or_goes_during_training(tmp_path):
    path = tfrecord(tmp_path / "x.tfrecord", [b"one", b"two"])
    records = open_records(str(path), {})
    os.truncate(path, 20)
    refused(r"x.tfrecord: has no bytes 31 to 34 any more", lambda: records.read([1]))
    records = pickle.loads(pickle.dumps(records))
    path.unlink()
    refused(r"x.tfrecord: can't be read: No such file", lambda: records.read([1]))


def test_threads_read_the_same_and_many_files_need_few_handles(tmp_path):
    for number in range(MOST_OPEN + 20):
        tfrecord(tmp_path / f"{number:04}.tfrecord", [b"%d" % number])
    records = open_records(str(tmp_path), {})
    before = len(os.listdir("/proc/self/fd"))
    orders = [np.random.default_rng(seed).permutation(len(records)) for seed in range(8)]
    with ThreadPoolExecutor(len(orders)) as pool:
        read = list(pool.map(records.read, orders))
    assert [batch.tolist() for batch in read] == [[b"%d" % number for number in order] for order in orders]
    assert len(os.listdir("/proc/self/fd")) - before <= MOST_OPEN


# ---- ``feed``: exact order, one trace, and one line for what can't be ----

DESCRIPTION = {"x": tf.io.FixedLenFeature([2], tf.float32), "y": tf.io.FixedLenFeature([1], tf.int64)}


def parse(record):
    parsed = tf.io.parse_single_example(record, DESCRIPTION)
    return {"x": parsed["x"]}, parsed["y"]


def parse_batch(records):
    parsed = tf.io.parse_example(records, DESCRIPTION)
    return {"x": parsed["x"]}, parsed["y"]


def changing(change):
    def changed(dataset, mode, metadata):
        return change(dataset)

    return changed


@pytest.fixture
def examples(tmp_path):
    for start in range(0, 30, 10):
        example_file(tmp_path / f"{start}.tfrecord", range(start, start + 10))
    return open_records(str(tmp_path), {})


def numbers(batch):
    inputs, labels = batch
    np.testing.assert_array_equal(inputs["x"], np.stack([labels[:, 0], -labels[:, 0]], 1))
    return labels[:, 0].tolist()


ASKED = [29, 0, 17, 3, 11, 4, 25]


def test_samples_come_in_the_order_that_is_asked_for_and_nothing_is_cached_for_the_next_micro_batch(examples):
    change = changing(lambda dataset: dataset.batch(4).map(parse_batch).unbatch().cache().prefetch(tf.data.AUTOTUNE))
    samples = FeedDataset(examples, change, "training")
    assert len(samples) == 30
    for asked in (ASKED, [5], list(range(30)), [3, 3, 3]):
        assert numbers(samples.__getitems__(asked)) == asked
    inputs, label = samples[7]
    assert (inputs["x"].tolist(), label.tolist()) == ([7, -7], [7])


def test_a_feed_that_shuffles_does_so_within_the_micro_batch(examples):
    def dataset_fn(dataset, mode):
        return dataset.map(parse).shuffle(1024) if mode == "training" else dataset.map(parse)

    tf.random.set_seed(None)  # another test may have set one: then each micro-batch is shuffled alike
    samples = FeedDataset(examples, dataset_fn, "training")
    orders = {tuple(numbers(samples.__getitems__(ASKED))) for _ in range(20)}
    assert len(orders) > 1
    assert {frozenset(order) for order in orders} == {frozenset(ASKED)}
    assert numbers(FeedDataset(examples, dataset_fn, "evaluation").__getitems__(ASKED)) == ASKED


TRACED = []


def of_a_table(dataset, mode, metadata):
    TRACED.append(1)
    keys = tf.constant([b"cook", b"judge"])
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, [7, 8]), -1)
    return dataset.map(lambda row: (row, table.lookup(row)))


def test_a_copy_traces_feed_anew_and_once_whatever_the_sizes(tmp_path):
    path = tfrecord(tmp_path / "x.tfrecord", [b"judge", b"cook", b"thief"])
    copied = pickle.loads(pickle.dumps(FeedDataset(open_records(str(path), {}), of_a_table, "training")))
    before = len(TRACED)
    for size in (1, 2, 3):
        assert copied.__getitems__(range(size))[1].tolist() == [8, 7, -1][:size], "a table made within feed stays"
    assert len(TRACED) == before <= 4


def test_records_of_several_arrays():
    rows = [{"x": np.array([2.0 * row, 2.0 * row + 1]), "y": row} for row in range(3)]
    pairs = changing(lambda dataset: dataset.map(lambda record: (record["x"] * 2, record["y"])))
    records = open_custom(lambda data_origin, records_per_task: rows, "x", "training", {})
    inputs, labels = FeedDataset(records, pairs, "training").__getitems__([2, 0])
    assert (inputs.tolist(), labels.tolist()) == ([[8, 10], [0, 2]], [2, 0])
    rows[2]["x"] = np.zeros(3)
    refused("records differ in shape or structure .*; expected equal ones", lambda: records.read([0, 2]))


@pytest.mark.parametrize(
    ("change", "asked", "expected"),
    [
        (lambda d: d.map(parse).repeat(), None, " gave more samples for 3 records; each record has to give one"),
        (lambda d: d.map(parse).batch(2), None, " gave 2 samples for 3 records"),
        (lambda d: d, None, " gives single tensors; expected (features, labels) pairs"),
        (lambda d: None, None, " returned NoneType; expected a tf.data.Dataset"),
        (lambda d: d.map(lambda r: (tf.sparse.from_dense([1]), 0)), None, " gives a SparseTensor; expected dense"),
        (lambda d: d.map(lambda r: (tf.io.parse_tensor(r, tf.float32), 0)), None, ": record 0 of "),
        (lambda d: d.map(parse).filter(lambda x, y: y[0] < 25), [3, 25], " gave 1 samples for 2 records"),
        (lambda d: d.map(lambda r: (tf.zeros(tf.cast(parse(r)[1], tf.int32)), 0)), [1, 2], "different shapes"),
    ],
)
def test_what_feed_must_not_do(examples, change, asked, expected):
    def use():
        samples = FeedDataset(examples, changing(change), "training")
        if asked:
            samples.__getitems__(asked)

    line = refused(r"^changed\(dataset, 'training', metadata\)", use)
    assert expected in line


def test_the_record_that_can_not_be_converted_is_named(tmp_path):
    example_file(tmp_path / "a.tfrecord", range(9))
    tfrecord(tmp_path / "b.tfrecord", [b"not an example"])
    samples = FeedDataset(open_records(str(tmp_path), {}), changing(lambda dataset: dataset.map(parse)), "training")
    told = r": record 0 of \S+/b.tfrecord: InvalidArgumentError: .*Could not parse example input"
    refused(told, lambda: samples.__getitems__([3, 9, 1]))


def test_another_signature_is_refused(examples):
    told = r"\(dataset\): expected \S+\(dataset, mode, metadata\)$"
    refused(told, lambda: FeedDataset(examples, lambda dataset: dataset, "training"))


# ---- modules as they are written for ElasticDL load and get their data unchanged; what can't be used is one line ----

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
    example_file(tmp_path / "new.tfrecord", range(5))
    given = {"task": "predict", "prediction_data": "new.tfrecord", "checkpoint_dir": "kept"}
    module, spec = make(DATASET_FN, PROCESSOR, **given)
    inputs, _ = open_inference(module, spec).__getitems__([3, 1])
    assert inputs["x"][:, 0].tolist() == [3, 1]
    make_processor(module)(tf.constant([[1.0]]), 0)


def test_a_module_over_tfrecords(make, tmp_path):
    paths = {"training_data": "train.tfrecord", "validation_data": "test.tfrecord"}
    for name, count in zip(paths.values(), (20, 5), strict=True):
        example_file(tmp_path / name, range(count))
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
