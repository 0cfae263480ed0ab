"""The Keras twin's loader: what it takes for a data set, and its thread."""

import threading

import numpy as np
import pytest
from elastic_keras_kit import Board, Samples, SumOfThreads
from session_kit import alone

from elasticdl.data import Arrays
from elasticdl.elastic.core.plan import BatchPolicy, epoch_order
from elasticdl.elastic.keras.loader import AHEAD, ElasticContext, ElasticDataLoader, fetch, load, load_ahead
from elasticdl.tensorflow import tf

TWO = np.array([3, 1])


def make_loader(dataset, **options):
    context = ElasticContext(alone(), SumOfThreads(0, Board(1)), BatchPolicy(16, None, 5), seed=0)
    return ElasticDataLoader(context, dataset, **options)


@pytest.mark.parametrize(("drop_last", "batches"), [(False, [16, 16, 16, 2]), (True, [16, 16, 16])])
def test_the_length_is_the_number_of_steps_in_an_epoch(drop_last, batches):
    loader = make_loader(Samples(50), drop_last=drop_last)
    assert len(loader) == len(batches)
    assert [batch.plan.batch for batch in loader] == batches


class Pairs(Samples):
    """As a list of samples at once, in PyTorch's way."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize("dataset", [Samples(), Pairs(), Arrays(Samples().inputs, Samples().labels)])
def test_any_kind_of_data_set_gives_the_same_batch(dataset):
    inputs, labels = load(dataset, TWO)
    np.testing.assert_array_equal(inputs, Samples().inputs[TWO])
    np.testing.assert_array_equal(labels, Samples().labels[TWO])


def test_nested_inputs_strings_and_floats_of_another_width():
    class Nested:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"number": np.float64(index), "name": f"n{index}"}, (index, [0.5])

    inputs, labels = load(Nested(), TWO)
    assert inputs["number"].dtype == tf.float32
    assert inputs["name"].numpy().tolist() == [b"n3", b"n1"]
    assert labels[0].numpy().tolist() == [3, 1]


class Broken(Samples):
    def __init__(self, sample):
        super().__init__()
        self.sample = sample

    def __getitem__(self, index):
        return self.sample(index)


def test_the_samples_of_an_epoch_in_the_plans_order():
    data = Samples()
    loader = make_loader(data)
    seen = [np.asarray(inputs) for batch in loader for inputs, _ in batch if loader.sampler.current is batch]
    assert [len(each) for each in seen] == [4] * 12 + [2]
    np.testing.assert_array_equal(np.concatenate(seen), data.inputs[epoch_order(50, 0, 0)])


def test_random_draws_of_the_data_set_are_those_of_the_step():
    loader = make_loader(Broken(lambda index: (np.random.normal(size=8), 0)))

    def first_two():
        batches = iter(loader)
        found = [np.concatenate([inputs for inputs, _ in next(batches)]) for _ in range(2)]
        batches.close()
        return found

    one, other = first_two(), first_two()
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one[0], one[1])


def test_an_error_of_the_data_set_is_raised_in_the_loop():
    def sample(index):
        raise KeyError("no such file")

    batches = iter(make_loader(Broken(sample)))
    with pytest.raises(KeyError, match="no such file"):
        list(next(batches))


def test_the_thread_runs_so_far_ahead_and_ends_when_closed():
    made, enough = [], threading.Event()

    def source():
        for number in range(100):
            made.append(number)
            if number == AHEAD:
                enough.set()
            yield number

    before = set(threading.enumerate())
    ahead = load_ahead(source())
    assert next(ahead) == 0
    assert next(ahead) == 1
    assert enough.wait(30)
    ahead.close()
    assert set(threading.enumerate()) == before
    assert len(made) <= AHEAD + 2  # those waiting, and those that were taken
    assert list(ahead) == []


def test_an_abandoned_loop_leaves_no_thread():
    before = set(threading.enumerate())
    for _ in make_loader(Samples()):
        break
    batches = fetch(Samples(), [TWO, TWO, TWO, TWO, TWO])
    next(batches)
    batches.close()
    assert set(threading.enumerate()) == before
