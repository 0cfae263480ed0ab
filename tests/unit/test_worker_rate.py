"""The learning rate: who may change it, and how it moves after a change of workers."""

import math

import pytest

from elasticdl.common.spec import JobSpec
from elasticdl.worker.ledger import Ledger
from elasticdl.worker.rate import LearningRate, double_correction, rate_policy


def policy(schedule=None, base=0.1, **options):
    return rate_policy(JobSpec(**options), base, schedule)


def test_a_fixed_global_batch_leaves_the_rate_alone():
    rate = LearningRate(policy(global_batch_size=64, learning_rate_ramp_steps=5), Ledger())
    for step, workers in enumerate((1, 4, 2)):
        rate.enter(0, workers, step)
        assert rate.at(step + 1) == 0.1


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 3.0), ("sqrt", math.sqrt(3))])
def test_a_fixed_batch_per_worker_follows_the_rule(rule, factor):
    assert policy(minibatch_size=8, learning_rate_scaling=rule).target(0, 3) == pytest.approx(0.1 * factor)


def test_the_schedule_is_asked_for_each_epoch_and_each_world():
    workers = 2
    rate = LearningRate(policy(lambda epoch: workers * (0.5 if epoch else 1.0), minibatch_size=8), Ledger())
    rate.enter(0, workers, 0)
    assert rate.at(1) == 2.0
    workers = 3
    rate.enter(0, workers, 1)
    assert rate.at(2) == 3.0
    rate.enter(1, workers, 5)
    assert rate.at(6) == 1.5


def ramped(ledger=None):
    return LearningRate(
        policy(base=1.0, minibatch_size=8, learning_rate_scaling="linear", learning_rate_ramp_steps=4),
        ledger or Ledger(),
    )


def walk(rate, ledger, first, last):
    rates = []
    for step in range(first, last + 1):
        ledger.learning_rate = rate.at(step)
        rates.append(ledger.learning_rate)
    return rates


def test_the_ramp_moves_step_by_step_from_where_it_was():
    ledger = Ledger()
    rate = ramped(ledger)
    rate.enter(0, 2, 0)
    assert walk(rate, ledger, 1, 10) == [2.0] * 10  # the first world begins without a ramp
    rate.enter(0, 4, 10)
    assert walk(rate, ledger, 11, 15) == [2.5, 3.0, 3.5, 4.0, 4.0]
    rate.enter(0, 2, 15)
    assert walk(rate, ledger, 16, 17) == [3.5, 3.0]
    rate.enter(0, 1, 17)  # within the ramp
    assert walk(rate, ledger, 18, 22) == [2.5, 2.0, 1.5, 1.0, 1.0]


def test_a_world_of_the_same_size_goes_on_with_the_ramp():
    ledger = Ledger()
    rate = ramped(ledger)
    rate.enter(0, 2, 0)
    walk(rate, ledger, 1, 10)
    rate.enter(0, 4, 10)
    walk(rate, ledger, 11, 12)
    newcomer = Ledger()
    newcomer.load_state_dict(ledger.state_dict())
    rate = ramped(newcomer)
    rate.enter(0, 4, 12)
    assert walk(rate, newcomer, 13, 15) == [3.5, 4.0, 4.0]


def constant(epoch):
    return 0.1


@pytest.mark.parametrize(
    ("options", "pretended", "warns"),
    [
        ({"global_batch_size": 64}, 0.3, "--global_batch_size keeps"),
        ({"global_batch_size": 64}, 0.2, None),
        ({"minibatch_size": 8}, 0.3, None),
        ({"minibatch_size": 8, "learning_rate_scaling": "linear"}, 0.3, "--learning_rate_scaling linear does so again"),
        ({"minibatch_size": 8, "learning_rate_scaling": "linear"}, 0.2, None),
    ],
)
def test_warns_of_correcting_twice(options, pretended, warns):
    warning = double_correction(policy(constant, **options), pretended, 0.2)
    assert (warning is None) == (warns is None)
    assert warns is None or warns in warning
