"""A step in one call where one worker has all of it, and XLA."""

import numpy as np
import pytest
from elastic_keras_kit import Board, Count, Trainee, assert_same, make_model, norm_layer, run_all

import keras  # isort: skip
import tensorflow as tf  # isort: skip

from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.keras.step import MicroBatch, TrainStep

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


def test_growth_and_shrinking_change_nothing_but_the_rounding():
    calm, boards = alone(WHOLE, lambda: ()), [Board(1), Board(2), Board(1)]
    calm.train(epochs=3)
    members = [Trainee(rank, boards[0], WHOLE, joins=False) for rank in range(2)]
    for number, board in enumerate(boards):
        present = members[: board.size]
        for rank, member in enumerate(present):
            member.enter(rank, board)
            member.state.load_state_dict(members[0].state.state_dict())
        run_all(present, lambda member, epochs=number + 1: member.train(epochs))
    np.testing.assert_allclose(members[0].losses, calm.losses, rtol=1e-5)
    for grown, expected in zip(members[0].weights(), calm.weights(), strict=True):
        np.testing.assert_allclose(grown, expected, rtol=1e-4, atol=1e-6)


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


def test_one_micro_batch_too_many_is_an_error():
    member = alone(WHOLE, all_layers)
    batch = next(steps := iter(member.loader))
    inputs, labels = next(iter(batch))
    before = member.weights()
    for _ in range(2):
        member.state.accumulate(inputs, labels)
    with pytest.raises(RuntimeError, match="made on 32 samples instead of 16"):
        member.state.update()
    assert_same(before, member.weights())
    steps.close()


def test_samples_of_other_kinds_are_traced_for_themselves():
    inputs = keras.Input((None, 3))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(inputs)))
    step = TrainStep(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.optimizers.SGD())
    part = MicroBatch(weight=1.0, is_first=True, seed=0, count=0)
    for length in (4, 5, 6, 7, 8):
        batch = np.ones((2, length, 3), np.float32), np.zeros(2, np.int64)
        assert np.isfinite(step.whole(*batch, part)).all()
    assert step.traces["differentiate"] <= 3


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


def test_xla_is_used_where_keras_would_use_it():
    on_cpu, told, refused = make_model(), make_model(), make_model()
    told.compile(jit_compile=True)
    refused.compile(jit_compile=False)
    sgd = keras.optimizers.SGD
    assert [TrainStep(each, None, sgd()).jit_compile for each in (on_cpu, told, refused)] == [None, True, None]


def test_a_model_that_xla_can_not_compile_is_not_compiled():
    class Plain(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_jit = False

        def call(self, inputs):
            return inputs

    model = make_model(lambda: (Plain(),))
    with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
        model.compile(jit_compile=True)
    assert not TrainStep(model, None, keras.optimizers.SGD()).jit_compile
