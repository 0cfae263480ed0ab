"""A step in one call where one worker has all of it, and XLA."""

import numpy as np
import pytest
from elastic_keras_kit import Board, Count, Trainee, assert_same, make_model, norm_layer

import keras  # isort: skip
import tensorflow as tf  # isort: skip

from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.keras.step import TrainStep

WHOLE = BatchPolicy(16, None, None)
HALVES = BatchPolicy(16, None, 8)


def all_layers():
    return *norm_layer(), Count(), keras.layers.Dense(16, activity_regularizer="l2")


def with_dropout():
    return *all_layers(), keras.layers.Dropout(0.5)


def alone(policy, layers, **kwargs):
    return Trainee(0, Board(1), policy, make_model(layers), **kwargs)


def unfused(member):
    """Have the same functions hand their sums to each other through the buffer, as with several workers."""

    def whole(*given):
        sums = member.train_step.micro(*given)
        report = member.train_step.read_report(sums)
        member.train_step.apply(sums)
        return report

    member.train_step.whole = whole
    return member


def test_a_whole_step_in_one_call_gives_the_bits_of_two():
    one, two = alone(WHOLE, with_dropout), unfused(alone(WHOLE, with_dropout))
    for member in (one, two):
        member.state.follow(LearningRate(lambda epoch: 0.1 / (epoch + 1)))
        member.train(epochs=3)
    assert one.losses == two.losses
    assert_same(one.weights(), two.weights())
    assert one.train_step.traces.keys() == {"differentiate", "update", "whole"}
    assert two.train_step.traces.keys() == {"differentiate", "update", "micro", "apply"}


def test_an_error_in_the_only_call_of_a_step_changes_nothing():
    class Checked(keras.layers.Layer):
        def call(self, inputs):
            return tf.debugging.check_numerics(inputs, "checked")

    member = alone(WHOLE, lambda: (keras.layers.BatchNormalization(), Checked()))
    member.train(steps=1)
    before = member.weights()
    batch = next(steps := iter(member.loader))
    next(iter(batch))
    member.state.accumulate(tf.fill([16, 8], np.float32("nan")), tf.zeros([16], tf.int64))
    with pytest.raises(tf.errors.InvalidArgumentError, match="checked"):
        member.state.update()
    assert_same(before, member.weights())
    steps.close()


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
    member = Trainee(0, Board(1), policy, joins=False)
    member.context.least_workers = least_workers
    member.context.session.core.under_master = under_master
    member.context.warm_up(member.train_step, tf.zeros([2, 8]), tf.zeros([2], tf.int64))
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
