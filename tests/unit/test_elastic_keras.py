"""The Keras twin's step in a world of one, with a stand-in for the sums of several workers, in one call, and by XLA; and its loader."""

import threading

import numpy as np
import pytest
from elastic_kit import Board, SumOfThreads, in_threads
from keras_benches import Count, KerasTrainee, Read, Samples, make_model
from session_kit import alone as alone_session

import keras  # isort: skip
import tensorflow as tf  # isort: skip

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.training_step import VOTE_SIZE
from elasticdl.elastic.keras.loader import ElasticContext, ElasticDataLoader, fetch
from elasticdl.elastic.keras.step import Part

WHOLE = BatchPolicy(16, None, None)
HALVES = BatchPolicy(16, None, 8)


def norm_layer():
    return (keras.layers.BatchNormalization(momentum=0.5),)


def assert_same(before, after):
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def alone(policy=HALVES, layers=lambda: ()):
    return KerasTrainee(0, Board(1), policy, make_model(layers))


# -- the numbers --


def test_running_statistics_are_the_weighed_mean_over_all_micro_batches():
    member = alone(BatchPolicy(10, None, 4), norm_layer)
    steps = iter(member.loader)
    batch = next(steps)
    dense, norm = member.model.layers[:2]
    means = []
    for part in batch.plan.micro_batches:
        means.append(part.weight * np.array(dense(member.loader.dataset.inputs[part.indices])).mean(0))
    assert [part.samples for part in batch.plan.micro_batches] == [4, 3, 3]
    member.state.make_step(batch)
    np.testing.assert_allclose(norm.moving_mean, 0.5 * sum(means), rtol=1e-5, atol=1e-6)


def test_a_counter_counts_once_a_step_whatever_the_micro_batches():
    board = Board(2)
    members = [KerasTrainee(rank, board, BatchPolicy(16, None, 3), make_model(lambda: (Count(),))) for rank in range(2)]
    in_threads(KerasTrainee.train, members)
    assert [int(member.model.layers[1].calls) for member in members] == [4, 4]


# -- random draws --


def test_a_repeated_step_draws_the_same_and_every_micro_batch_something_else():
    member = alone(HALVES, lambda: (keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.5)))
    inputs, labels = tf.ones([4, 8]), tf.zeros([4], tf.int64)
    seeds = [v for v in member.model.non_trainable_variables if v.path.endswith("seed_generator_state")]
    before = [seed.numpy() for seed in seeds]

    def draw(**kwargs):
        part = {"weight": 1.0, "is_first": True, "seed": 1, "count": 0} | kwargs
        step = member.train_step
        return float(step.read_report(step.micro(inputs, labels, Part(**part)))[-1 - VOTE_SIZE])

    assert len(seeds) == 2
    assert draw() == draw()
    assert len({draw(), draw(seed=2), draw(count=1)}) == 3
    assert_same(before, [seed.numpy() for seed in seeds])


def all_layers():
    return *norm_layer(), Count(), keras.layers.Dense(16, activity_regularizer="l2")


@pytest.mark.parametrize(
    ("policy", "least_workers", "under_master", "outer"),
    [
        (WHOLE, 1, False, {"whole"}),
        (HALVES, 1, False, {"micro", "add", "apply"}),
        (WHOLE, 1, True, {"whole", "micro", "add", "apply"}),
        (WHOLE, 2, True, {"micro", "add", "apply"}),
    ],
)
def test_what_the_job_may_need_is_traced_at_the_start_and_nothing_later(policy, least_workers, under_master, outer):
    layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
    member = KerasTrainee(0, Board(1), policy, make_model(lambda: layers), joins=False)
    before = member.weights()
    member.context.least_workers = least_workers
    member.context.session.core.under_master = under_master
    member.context.warm_up(member.train_step, tf.zeros([2, 8]), tf.zeros([2], tf.int64))
    assert_same(before, member.weights())
    member.enter()
    member.train()
    assert member.train_step.traces == dict.fromkeys({"differentiate", "update"} | outer, 1)


# -- XLA --


def test_a_step_that_xla_compiles_gives_the_same_numbers():
    model = make_model(all_layers)
    model.compile(jit_compile=True)
    plain, compiled = alone(WHOLE, all_layers), KerasTrainee(0, Board(1), WHOLE, model)
    for member in (plain, compiled):
        member.train(epochs=2)
    assert compiled.train_step.jit_compile
    np.testing.assert_allclose(compiled.losses, plain.losses, rtol=1e-4)
    for one, other in zip(compiled.weights(), plain.weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


# -- the loader --


TWO = np.array([3, 1])


def make_loader(dataset, **options):
    context = ElasticContext(alone_session(), SumOfThreads(0, Board(1)), BatchPolicy(16, None, 5), seed=0)
    return ElasticDataLoader(context, dataset, **options)


def test_random_draws_of_the_data_set_are_those_of_the_step():
    loader = make_loader(Read(lambda index: (np.random.normal(size=8), 0)))

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

    batches = iter(make_loader(Read(sample)))
    with pytest.raises(KeyError, match="no such file"):
        list(next(batches))


def test_an_abandoned_loop_leaves_no_thread():
    before = set(threading.enumerate())
    for _ in make_loader(Samples()):
        break
    batches = fetch(Samples(), [TWO, TWO, TWO, TWO, TWO])
    next(batches)
    batches.close()
    assert set(threading.enumerate()) == before
