"""The rules of the learning rate that options and callbacks mean."""

import pytest

from elasticdl.callbacks import Callback, LearningRateScheduler
from elasticdl.elastic.core.learning_rate import LearningRate
from elasticdl.job.spec import JobSpec
from elasticdl.worker.batch_sizes import rate_rules


def half(epoch):
    return 0.5


def tenth(epoch):
    return 0.1


def test_nothing_asked_for_leaves_the_rate_alone():
    assert rate_rules(JobSpec(), [Callback()]) == LearningRate()


@pytest.mark.parametrize(("option", "scaling"), [("none", None), ("linear", "linear"), ("sqrt", "sqrt")])
def test_options_are_taken_over(option, scaling):
    spec = JobSpec(minibatch_size=8, learning_rate_scaling=option, learning_rate_ramp_steps=5)
    assert rate_rules(spec, []) == LearningRate(scaling=scaling, ramp_steps=5)


def test_the_last_scheduler_counts():
    callbacks = [LearningRateScheduler(half), Callback(), LearningRateScheduler(tenth)]
    assert rate_rules(JobSpec(), callbacks) == LearningRate(tenth)
