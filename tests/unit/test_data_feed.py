"""``feed`` over just the records of a micro-batch: exact order, one trace, and one line for what can't be."""

import inspect
import pickle

import numpy as np
import pytest
import tensorflow as tf
from data_kit import text, tfrecord

from elasticdl.common.errors import UserError
from elasticdl.data.feed import FeedDataset
from elasticdl.data.open import open_records


def example(number):
    features = {
        "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number, -number])),
        "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


DESCRIPTION = {"x": tf.io.FixedLenFeature([2], tf.float32), "y": tf.io.FixedLenFeature([1], tf.int64)}


def parse(record):
    parsed = tf.io.parse_single_example(record, DESCRIPTION)
    return {"x": parsed["x"]}, parsed["y"]


def parse_batch(records):
    parsed = tf.io.parse_example(records, DESCRIPTION)
    return {"x": parsed["x"]}, parsed["y"]


def feed(dataset, mode, metadata):
    return dataset.map(parse)


def dataset_fn(dataset, mode):
    return dataset.map(parse, num_parallel_calls=4).shuffle(1024) if mode == "training" else dataset.map(parse)


@pytest.fixture
def examples(tmp_path):
    for start in range(0, 30, 10):
        tfrecord(tmp_path / f"{start}.tfrecord", map(example, range(start, start + 10)))
    return open_records(str(tmp_path), {})


def numbers(batch):
    inputs, labels = batch
    np.testing.assert_array_equal(inputs["x"], np.stack([labels[:, 0], -labels[:, 0]], 1))
    return labels[:, 0].tolist()


ASKED = [29, 0, 17, 3, 11, 4, 25]


def test_samples_come_in_the_order_that_is_asked_for(examples):
    samples = FeedDataset(examples, feed, "training")
    assert len(samples) == 30
    for asked in (ASKED, [5], list(range(30)), [3, 3, 3]):
        assert numbers(samples.__getitems__(asked)) == asked
    inputs, label = samples[7]
    assert (inputs["x"].tolist(), label.tolist()) == ([7, -7], [7])
    assert isinstance(label, np.ndarray)


def test_a_feed_that_shuffles_does_so_within_the_micro_batch(examples):
    tf.random.set_seed(None)  # another test may have set one: then each micro-batch is shuffled alike
    samples = FeedDataset(examples, dataset_fn, "training")
    orders = {tuple(numbers(samples.__getitems__(ASKED))) for _ in range(20)}
    assert len(orders) > 1
    assert {frozenset(order) for order in orders} == {frozenset(ASKED)}
    assert numbers(FeedDataset(examples, dataset_fn, "evaluation").__getitems__(ASKED)) == ASKED


@pytest.mark.parametrize("size", [1, 2, 3, 64])
@pytest.mark.parametrize("parsed_as_batch", [True, False])
def test_batches_of_feed_are_undone(examples, size, parsed_as_batch):
    def batching(dataset, mode, metadata):
        return dataset.batch(size).map(parse_batch) if parsed_as_batch else dataset.map(parse).batch(size)

    samples = FeedDataset(examples, batching, "training")
    for asked in (ASKED, [5], list(range(30))):
        assert numbers(samples.__getitems__(asked)) == asked


def test_other_steps_of_a_pipeline(examples):
    def busy(dataset, mode, metadata):
        unpacked = dataset.batch(4).map(parse_batch, num_parallel_calls=tf.data.AUTOTUNE).unbatch()
        return unpacked.cache().prefetch(tf.data.AUTOTUNE)

    samples = FeedDataset(examples, busy, "training")
    assert numbers(samples.__getitems__(ASKED)) == ASKED
    assert numbers(samples.__getitems__([1, 2])) == [1, 2]  # and not what was cached before


def test_feed_is_traced_once(examples):
    calls = []

    def counting(dataset, mode, metadata):
        calls.append(mode)
        return dataset.map(parse)

    samples = FeedDataset(examples, counting, "training")
    before = len(calls)
    for size in range(1, 20):
        samples.__getitems__(list(range(size)))
    assert len(calls) == before <= 2


def test_csv_with_its_columns(tmp_path):
    text(tmp_path / "x.csv", 'age,job,rich\n30,cook,0\n40,"judge, retired",1\n')

    def columns(dataset, mode, metadata):
        place = {name: number for number, name in enumerate(metadata.column_names)}

        def convert(row):
            features = {"age": tf.strings.to_number(row[place["age"]]), "job": row[place["job"]]}
            return features, tf.strings.to_number(row[place["rich"]], tf.int32)

        return dataset.map(convert)

    inputs, labels = FeedDataset(open_records(str(tmp_path), {}), columns, "training").__getitems__([1, 0])
    assert (inputs["age"].tolist(), inputs["job"].tolist()) == ([40, 30], [b"judge, retired", b"cook"])
    assert labels.tolist() == [1, 0]


def test_records_of_several_arrays(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.arange(6.0).reshape(3, 2), y=np.arange(3))

    def pairs(dataset, mode, metadata):
        return dataset.map(lambda record: (record["x"] * 2, record["y"]))

    inputs, labels = FeedDataset(open_records(str(tmp_path), {}), pairs, "training").__getitems__([2, 0])
    assert (inputs.tolist(), labels.tolist()) == ([[8, 10], [0, 2]], [2, 0])


def table_feed(dataset, mode, metadata):
    keys = tf.constant([b"cook", b"judge"])
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, [7, 8]), -1)
    return dataset.map(lambda row: (row[0], table.lookup(row[0])))


def test_a_table_made_within_feed_stays(tmp_path):
    text(tmp_path / "x.csv", "job\njudge\ncook\nthief\n")
    samples = FeedDataset(open_records(str(tmp_path), {}), table_feed, "training")
    for _ in range(3):
        assert samples.__getitems__([0, 1, 2])[1].tolist() == [8, 7, -1]


def test_a_single_record_is_enough(tmp_path):
    samples = FeedDataset(open_records(str(tfrecord(tmp_path / "x.tfrecord", [example(5)])), {}), feed, "training")
    assert numbers(samples.__getitems__([0])) == [5]


def test_a_copy_traces_anew(examples):
    samples = pickle.loads(pickle.dumps(FeedDataset(examples, feed, "training")))
    assert numbers(samples.__getitems__(ASKED)) == ASKED


def refusal(examples, change):
    def changed(dataset, mode, metadata):
        return change(dataset)

    with pytest.raises(UserError) as caught:
        FeedDataset(examples, changed, "training")
    line = str(caught.value)
    assert "\n" not in line
    return line.removeprefix("changed(dataset, 'training', metadata)")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda d: d.map(parse).repeat(2), " gave more samples for 3 records; each record has to give one sample"),
        (lambda d: d.map(parse).repeat(), " gave more samples for 3 records"),
        (lambda d: d.map(parse).filter(lambda x, y: False), " gave 0 samples for 3 records"),
        (lambda d: d.map(parse).filter(lambda x, y: y[0] != 1), " gave 2 samples for 3 records"),
        (lambda d: d.map(parse).take(1), " gave 1 samples for 3 records"),
        (lambda d: d.map(parse).batch(64, drop_remainder=True), " gave 0 samples for 3 records"),
        (lambda d: d.map(parse).batch(2).repeat(), " gave more samples for 3 records"),
        (lambda d: d, " gives single tensors; expected (features, labels) pairs"),
        (lambda d: d.map(lambda r: parse(r)[0]), " gives dicts; expected (features, labels) pairs"),
        (lambda d: d.map(lambda r: (r, r, r)), " gives 3 values; expected (features, labels) pairs"),
        (lambda d: None, " returned NoneType; expected a tf.data.Dataset"),
        (lambda d: d.map(lambda r: (tf.sparse.from_dense([1]), 0)), " gives a SparseTensor; expected dense tensors"),
        (lambda d: d.map(lambda r: (tf.io.parse_tensor(r, tf.float32), 0)), ": record 0 of "),
    ],
)
def test_what_feed_must_not_do(examples, change, expected):
    assert refusal(examples, change).startswith(expected)


def test_a_feed_that_drops_later_on(examples):
    def picky(dataset, mode, metadata):
        return dataset.map(parse).filter(lambda x, y: y[0] < 25)

    samples = FeedDataset(examples, picky, "training")
    assert numbers(samples.__getitems__([3, 24])) == [3, 24]
    with pytest.raises(UserError, match=r"gave 1 samples for 2 records; each record has to give one sample"):
        samples.__getitems__([3, 25])
    with pytest.raises(UserError, match=r"gave 0 samples for 2 records; each record has to give one sample"):
        samples.__getitems__([26, 25])


def test_the_record_that_can_not_be_converted_is_named(tmp_path):
    path = tfrecord(tmp_path / "x.tfrecord", [*map(example, range(9)), b"not an example"])
    samples = FeedDataset(open_records(str(path), {}), feed, "training")
    with pytest.raises(UserError) as caught:
        samples.__getitems__([3, 9, 1])
    line = str(caught.value)
    assert line.startswith(f"feed(dataset, 'training', metadata): record 9 of {path}: InvalidArgumentError: ")
    assert "Could not parse example input" in line
    assert "\n" not in line


def test_samples_of_different_shape(examples):
    def ragged(dataset, mode, metadata):
        return dataset.map(lambda r: (tf.zeros(tf.cast(parse(r)[1], tf.int32)), 0))

    samples = FeedDataset(examples, ragged, "training")
    with pytest.raises(UserError, match=r"ragged\(dataset, 'training', metadata\): .*different shapes"):
        samples.__getitems__([1, 2])


def test_what_feed_raises_is_the_users_own_error(examples):
    def broken(dataset, mode, metadata):
        return dataset.map(lambda record: undefined)  # noqa: F821

    with pytest.raises(NameError):
        FeedDataset(examples, broken, "training")


def test_another_signature(examples):
    def alone(dataset):
        return dataset

    with pytest.raises(UserError) as caught:
        FeedDataset(examples, alone, "training")
    assert str(caught.value) == f"alone{inspect.signature(alone)}: expected alone(dataset, mode, metadata)"
