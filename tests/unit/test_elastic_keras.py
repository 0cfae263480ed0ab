"""The Keras twin's step in a world of one, with a stand-in for the sums of several workers, in one call, and by XLA."""

import io

import numpy as np
import pytest
from elastic_keras_kit import (
    Board,
    Count,
    Trainee,
    assert_same,
    make_model,
    norm_layer,
    plain_losses,
    run_all,
    train_together,
)

import keras  # isort: skip
import tensorflow as tf  # isort: skip

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.training_step import VOTE_SIZE
from elasticdl.elastic.keras.keras_state import LayerAttributes
from elasticdl.elastic.keras.step import Part, TrainStep
from elasticdl.worker.keras_learner import KerasLearner

WHOLE = BatchPolicy(16, None, None)
HALVES = BatchPolicy(16, None, 8)


def alone(policy=HALVES, layers=lambda: (), **kwargs):
    return Trainee(0, Board(1), policy, make_model(layers), **kwargs)


class Net(keras.Sequential):
    """Of the script's own, so that what it keeps is compared."""


def test_the_history_that_keras_leaves_with_a_model_of_the_scripts_own_is_not_compared():
    model = Net([keras.Input((2,)), keras.layers.Dense(1)])
    before = LayerAttributes(model).compared()
    assert before == LayerAttributes(model).compared()
    model.history = keras.callbacks.History()
    assert LayerAttributes(model).compared() == before
    model.temperature = 2.0
    assert LayerAttributes(model).compared() != before


# -- the numbers --


@pytest.mark.parametrize(("workers", "bound"), [(1, None), (1, 5), (4, None)])
def test_any_number_of_workers_gives_the_losses_of_plain_keras(workers, bound):
    expected = plain_losses(16)
    for member in train_together(workers, BatchPolicy(16, None, bound)):
        np.testing.assert_allclose(member.losses, expected, rtol=2e-5, atol=1e-6)


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


@pytest.mark.parametrize("bound", [None, 3])
def test_a_regularizer_counts_once_per_global_batch(bound):
    layers = lambda: (keras.layers.Dense(16, kernel_regularizer=keras.regularizers.L2(0.1)),)  # noqa: E731
    members = train_together(2, BatchPolicy(16, None, bound), epochs=1, layers=layers)
    np.testing.assert_allclose(members[0].losses, plain_losses(16, 1, layers), rtol=2e-5)


class CountSamples(keras.layers.Layer):
    """How many it has seen."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, inputs):
        self.seen.assign_add(keras.ops.shape(inputs)[0])
        return inputs


@pytest.mark.parametrize(("workers", "bound", "seen"), [(1, None, 50), (1, 5, 14), (2, None, 25), (2, 3, 10)])
def test_a_counter_counts_as_in_the_first_micro_batch_of_a_step(workers, bound, seen):
    model = keras.Sequential([keras.Input((8,)), CountSamples(), Count(), keras.layers.Dense(3)])
    board = Board(workers)
    models = [model, *(keras.models.clone_model(model) for _ in range(workers - 1))]
    for each in models:
        each.set_weights(model.get_weights())
    members = [Trainee(rank, board, BatchPolicy(16, None, bound), models[rank]) for rank in range(workers)]
    run_all(members, lambda member: member.train(1))
    for each in models:
        assert int(each.layers[0].seen) == seen
        assert int(each.layers[1].calls) == 4, "once a step, whatever the micro-batches"


def test_a_scaled_loss_gives_the_same_weights():
    plain, scaled = alone(), alone(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, 0.9)))
    plain.train()
    scaled.train()
    assert plain.losses == pytest.approx(scaled.losses, rel=1e-6)
    np.testing.assert_allclose(plain.model.get_weights()[0], scaled.model.get_weights()[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "summed"), [("mixed_float16", "float32"), ("float64", "float64")])
def test_sums_are_in_single_precision_at_least(kind, summed):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, dtype=kind)])
    member = Trainee(0, Board(1), HALVES, model)
    member.train(epochs=3)
    assert member.train_step.dtype == summed
    assert 0 < member.losses[-1] < member.losses[0]


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


# -- checkpoints --


def test_state_dict_is_plain_numpy_and_loads_elsewhere_from_a_file():
    one, other = alone(), alone()
    one.train(steps=2)
    dumped = one.state.state_dict()
    one_weights = one.weights()
    assert {type(value) for name in ("model", "optimizer") for value in dumped[name]} == {np.ndarray}
    codec, file = KerasLearner.codec, io.BytesIO()
    codec.write(codec.copy(dumped), file)
    file.seek(0)
    other.state.load_state_dict(codec.read(file))
    assert_same(one_weights, other.weights())
    one.train(steps=3)
    assert_same(one_weights, other.weights())  # copies, not views
    assert other.state.step == 2


def test_a_state_of_another_model_is_refused_before_anything_is_loaded():
    member, other = alone(), alone(HALVES, lambda: (keras.layers.Dense(16),))
    before = member.weights()
    with pytest.raises(UserError, match="of another model: it has 6 variables, and this one has 4"):
        member.state.load_state_dict(other.state.state_dict())
    dumped = member.state.state_dict()
    dumped["optimizer"][-1] = np.zeros(5)
    with pytest.raises(UserError, match=r"of another optimizer: .*shape \(3,\), and there it has \(5,\)"):
        member.state.load_state_dict(dumped)
    assert_same(before, member.weights())


# -- the learning rate --


def test_the_rate_of_a_step_is_set_before_its_update():
    member = alone(WHOLE, optimizer=keras.optimizers.SGD(0.1))
    member.state.follow(LearningRate(lambda epoch: 0.0))
    before = [v.numpy() for v in member.model.trainable_variables]
    member.train(steps=1)
    assert_same(before, [v.numpy() for v in member.model.trainable_variables])
    assert member.state.learning_rate == 0.0


def all_layers():
    return *norm_layer(), Count(), keras.layers.Dense(16, activity_regularizer="l2")


def test_an_error_in_the_only_call_of_a_step_changes_nothing():
    class Checked(keras.layers.Layer):
        def call(self, inputs):
            return tf.debugging.check_numerics(inputs, "checked")

    member = alone(WHOLE, lambda: (keras.layers.BatchNormalization(), Checked()))
    member.train(steps=1)
    before = member.weights()
    member.data.inputs[:] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match="checked"):
        member.train()
    assert_same(before, member.weights())


@pytest.mark.parametrize(
    ("policy", "least_workers", "under_master", "outer"),
    [
        (WHOLE, 1, False, {"whole"}),
        (HALVES, 1, False, {"micro", "add", "apply"}),
        (WHOLE, 1, True, {"whole", "micro", "add", "apply"}),
        (WHOLE, 2, True, {"micro", "add", "apply"}),
        (BatchPolicy(None, 8), 1, True, {"whole", "micro", "add", "apply"}),
    ],
)
def test_what_the_job_may_need_is_traced_at_the_start_and_nothing_later(policy, least_workers, under_master, outer):
    layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)
    member = Trainee(0, Board(1), policy, make_model(lambda: layers), joins=False)
    before = member.weights()
    member.context.least_workers = least_workers
    member.context.session.core.under_master = under_master
    member.context.warm_up(member.train_step, tf.zeros([2, 8]), tf.zeros([2], tf.int64))
    assert_same(before, member.weights())
    member.enter(0, Board(1))
    member.train()
    assert member.train_step.traces == dict.fromkeys({"differentiate", "update"} | outer, 1)


# -- XLA --


@pytest.mark.parametrize("policy", [WHOLE, pytest.param(HALVES, marks=pytest.mark.slow)])
def test_a_step_that_xla_compiles_gives_the_same_numbers(policy):
    plain, compiled = alone(policy, all_layers), alone(policy, all_layers, jit_compile=True)
    for member in (plain, compiled):
        member.train(epochs=2)
    assert compiled.train_step.jit_compile
    np.testing.assert_allclose(compiled.losses, plain.losses, rtol=1e-4)
    for one, other in zip(compiled.weights(), plain.weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


class NoXla(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.supports_jit = False

    def call(self, inputs):
        return inputs


@pytest.mark.filterwarnings("ignore:.*doesn't support `jit_compile=True`")
@pytest.mark.parametrize(
    ("layers", "told", "used"), [((), True, True), ((), False, None), ((), None, None), ((NoXla,), True, None)]
)
def test_xla_is_used_where_it_is_asked_for_and_can_be(layers, told, used):
    model = make_model(lambda: [each() for each in layers])
    if told is not None:
        model.compile(jit_compile=told)
    assert TrainStep(model, None, keras.optimizers.SGD()).jit_compile == used
