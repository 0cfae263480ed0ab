"""The learning rate: who may change it, and how it moves after a change of workers."""

import math

import pytest
import torch
from elastic_kit import Board, SumOfThreads
from refusal_kit import refused
from session_kit import FakeMaster

import elasticdl.elastic.torch as elastic
from elasticdl.elastic.core.learning_rate import LearningRate, RateControl
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_state import TorchState


def world(workers, version=1):
    return World.of(version, tuple(Member(i, "h", 0, True) for i in range(workers)), 0)


def walk(control, workers, first, last, version=1):
    """The rates of some steps made in one world."""
    rates = []
    for step in range(first, last + 1):
        rates.append(control.at(step, 0, world(workers, version)))
        control.made()
    return rates


@pytest.mark.parametrize(
    ("rules", "fixed_batch", "expected"),
    [
        (LearningRate(ramp_steps=5), True, 0.1),
        (LearningRate(), False, 0.1),
        (LearningRate(scaling="linear"), False, 0.3),
        (LearningRate(scaling="sqrt"), False, 0.1 * math.sqrt(3)),
        (LearningRate(lambda epoch: 0.2, scaling="linear"), False, 0.6),
    ],
)
def test_a_fixed_batch_leaves_the_rate_alone_and_one_per_worker_follows_the_rule(rules, fixed_batch, expected):
    assert RateControl(rules, 0.1, fixed_batch=fixed_batch).at(1, 0, world(3)) == pytest.approx(expected)


def ramped(base=1.0):
    return RateControl(LearningRate(scaling="linear", ramp_steps=4), base, fixed_batch=False)


def test_the_ramp_moves_step_by_step_from_where_it_was_and_a_newcomer_goes_on_with_it():
    control, newcomer = ramped(), ramped()
    assert walk(control, 2, 1, 10) == [2.0] * 10  # the first world begins without a ramp
    for version, workers in ((2, 4), (3, 1)):
        control.at(11, 0, world(workers, version))  # a step that is not made leaves no trace
    assert walk(control, 4, 11, 12, version=4) == [2.5, 3.0]
    newcomer.state = control.state
    assert walk(newcomer, 4, 13, 15, version=5) == walk(control, 4, 13, 15, version=5) == [3.5, 4.0, 4.0]
    assert walk(control, 2, 16, 17, version=6) == [3.5, 3.0]
    assert walk(control, 1, 18, 22, version=7) == [2.5, 2.0, 1.5, 1.0, 1.0]  # within the ramp
    zero = ramped(base=0.0)
    assert walk(zero, 2, 1, 1) + walk(zero, 4, 2, 3, version=2) == [0.0, 0.0, 0.0], "a rate of zero begins no ramp"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LearningRate(scaling="cubic"), r"\(scaling='cubic'\): must be one of linear, sqrt, or None"),
        (lambda: LearningRate(ramp_steps=-1), r"\(ramp_steps=-1\): must be at least 0"),
        (lambda: RateControl(LearningRate(scaling="linear"), 0.1, fixed_batch=True), "is fixed: leave one out"),
        (lambda: elastic.TorchState(model=None, optimizer=None, loader=object(), sampler=object()), "give one of them"),
    ],
)
def test_rules_that_make_no_sense_are_refused(make, words):
    refused(words, make)


# -- on an optimizer --


def two_groups(kind=float):
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    return torch.optim.SGD([{"params": [first], "lr": kind(0.1)}, {"params": [second], "lr": kind(0.02)}])


def set_rate(optimizer, rules, policy, world):
    """As a state does it before an update."""
    context = ElasticContext(FakeMaster().session, SumOfThreads(0, Board(1)), policy, seed=0)
    model = torch.nn.ParameterList(each for group in optimizer.param_groups for each in group["params"])
    state = TorchState(context, model, optimizer, None, {})
    state.follow(rules)
    context.collective.world = world
    state._before_update()


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_groups_keep_their_ratio_to_the_first(kind):
    optimizer = two_groups(kind)
    set_rate(optimizer, LearningRate(lambda epoch: 0.4), BatchPolicy(20, None), world(1))
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.4, 0.08])
    assert all(isinstance(group["lr"], type(kind(0.1))) for group in optimizer.param_groups)


def test_an_optimizer_from_a_checkpoint_is_not_scaled_again():
    rules, optimizer, again = LearningRate(scaling="linear"), two_groups(), two_groups()
    set_rate(optimizer, rules, BatchPolicy(None, 20), world(4))
    again.load_state_dict(optimizer.state_dict())
    set_rate(again, rules, BatchPolicy(None, 20), world(2, version=2))
    assert [group["lr"] for group in again.param_groups] == pytest.approx([0.2, 0.04])
