"""``feed`` over just the records of a micro-batch: exact order, one trace, and one line for what can't be."""

import pickle

import numpy as np
import pytest
import tensorflow as tf
from data_kit import examples as example_file
from data_kit import tfrecord
from refusal_kit import refused

from elasticdl.data.custom_reader import open_custom
from elasticdl.data.feed import FeedDataset
from elasticdl.data.open import open_records

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
