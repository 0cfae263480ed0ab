"""What differs between the states of workers is named, or mended if it is no more than rounding."""

from __future__ import annotations

import re

import elastic_kit
import numpy as np
import pytest
import torch
from elastic_kit import Trainee
from keras_benches import KerasTrainee
from loop_benches import run
from torch.optim.lr_scheduler import StepLR

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.elastic.training.data_facts import TRAINING, Source
from elasticdl.tensorflow import keras

POLICY = BatchPolicy(16, None)
STEPS = 4  # of an epoch: 50 samples


def members_of(kind, check_state="epoch", workers=3, **options):
    board = elastic_kit.Board(workers)
    members = [kind(rank, board, POLICY, check_state=check_state, **options) for rank in range(workers)]
    for rank, member in enumerate(members):
        member.state._check._worker_id = member.context._core.worker_id = rank
    return members


def told_by(members):
    """What goes into the journal, from now on."""
    told = []
    for member in members:
        member.state._check._tell = told.append
    return told


def train(members, plant=id, epochs=3, at=1, step=0, each=id):
    """What each member says at its end, or None. ``plant``: done on rank 2 in this epoch, after its step of this number. ``each``: on each, after each step."""

    def work(member):
        try:
            for epoch in member.loader.epochs(epochs):
                for number, batch in enumerate(member.loader):
                    member.make_step(batch)
                    member.state.commit()
                    if (epoch, number) == (at, step) and member.context.rank == 2:
                        plant(member)
                    each(member)
            member.state.cast_end_vote()
        except UserError as error:
            return str(error)
        except WorldBroken as error:
            return f"torn: {error}"
        return None

    return elastic_kit.in_threads(work, members)


# -- what is planted --


def scaled(factor):
    def plant(member):
        if isinstance(member.model, keras.Model):
            variable = member.model.trainable_variables[0]
            variable.assign(variable.numpy() * np.float32(factor))
        else:
            with torch.no_grad():
                member.model[0].weight *= factor

    return plant


def other_rate(member):
    if isinstance(member.model, keras.Model):
        member.optimizer.learning_rate = 0.2
    else:
        member.optimizer.param_groups[0]["lr"] = 0.2


def other_slot(member):
    next(iter(member.optimizer.state.values()))["momentum_buffer"] += 1.0


def other_statistic(member):
    member.model[1].running_mean += 1.0


def other_schedule(member):
    member.state.scheduler.last_epoch = 7


def frozen(member):
    member.model[0].requires_grad_(False)


def other_data(member):
    member.state.sources = [Source.of(TRAINING, list(range(51)))]


def as_newcomer(plant=id):
    def planted(member):
        member.state._position.made = 0
        plant(member)

    return planted


# -- who has made no step and alone differs is refused alone --

RATES = ".* is 0.1 on worker 0 and 0.2 on worker 2"


@pytest.mark.parametrize(
    ("kind", "plant", "step", "named"),
    [
        (Trainee, other_rate, 1, "optimizer.param_groups.0.lr" + RATES),
        (Trainee, scaled(1.01), 3, "model.0.weight differs by 0.0"),
        (Trainee, frozen, 1, "the workers train different parameters, of which this one has 2"),
        (Trainee, other_data, 3, "its training data have 51 samples, the job's 50"),
        (KerasTrainee, other_rate, 1, "optimizer.learning_rate" + RATES),
        (KerasTrainee, scaled(1.01), 3, "/kernel"),
    ],
)
def test_it_is_named_and_the_others_make_the_step_again(kind, plant, step, named):
    members = members_of(kind)

    def new_world(member):
        """In the first step of which all is compared."""
        member.state._agreed = -1

    torn, other, refused = train(members, as_newcomer(plant), at=0, step=step, epochs=2, each=new_world)
    assert re.match(f"refused: .*{named}", refused)
    assert torn == other
    assert torn.startswith("torn: workers [2] are refused: ")
    assert [member.state.step for member in members] == [step + 1] * 3


def test_who_ends_apart_from_the_rest_is_refused_too():
    members = members_of(Trainee)

    def work(member):
        is_newcomer = member.context.rank == 2
        (said,) = train([member], epochs=1 if is_newcomer else 2, each=as_newcomer() if is_newcomer else id)
        return said

    torn, other, refused = elastic_kit.in_threads(work, members)
    said = f"refused: 1 of 3 workers ended their training after step {STEPS} and the others go on: "
    assert refused.startswith(said)
    assert torn == other == f"torn: workers [2] are {refused}"


# -- otherwise the job ends in one line, at the latest before the second step of an epoch --


@pytest.mark.parametrize(
    ("kind", "plant", "at", "step", "named"),
    [
        (Trainee, scaled(1.01), (0, 3), 4, "model.0.weight differs by 0.0"),
        (Trainee, other_slot, (0, 1), 4, "optimizer.state.0.momentum_buffer differs by"),
        (Trainee, other_statistic, (0, 1), 4, "model.1.running_mean differs by"),
        (Trainee, other_schedule, (0, 1), 4, "scheduler.last_epoch is 0 on worker 0 and 7"),
        # A rate is found before it is used.
        (Trainee, other_rate, (1, 1), 6, "optimizer.param_groups.0.lr" + RATES),
        (KerasTrainee, other_rate, (1, 1), 6, "optimizer.learning_rate" + RATES),
    ],
)
def test_what_differs_is_named_and_nobody_has_stepped_since(kind, plant, at, step, named):
    def values(member):
        return {"scheduler": StepLR(member.optimizer, 1, gamma=0.5)}

    given = {"batch_norm": True, "values": values, "data": elastic_kit.make_data(64)}
    members = members_of(kind, **(given if kind is Trainee else {}))
    (line,) = set(train(members, plant, at=at[0], step=at[1]))
    same = 0 if step == STEPS else step - 1
    said = f"after step {step} worker 2 holds another state than workers 0 and 1: .*{named}.*; after step {same} they"
    assert re.match(said, line), line
    assert [member.state.step for member in members] == [step] * 3


@pytest.mark.parametrize("kind", [Trainee, KerasTrainee])
def test_rounding_is_mended_and_told_once(kind):
    members = members_of(kind)
    told = told_by(members)
    assert train(members, scaled(1 + 2**-23)) == [None] * 3
    (line,) = told
    assert line.startswith(f"after step {2 * STEPS} the workers' states were not the same, ")
    assert line.endswith(": all have taken rank 0's")
    for other in members[1:]:
        np.testing.assert_equal(other.weights(), members[0].weights())


@pytest.mark.parametrize(("kind", "stand_with_root"), [(Trainee, False), (Trainee, True), (KerasTrainee, False)])
def test_whatever_differs_can_be_repaired(kind, stand_with_root):
    members = members_of(kind, "repair")
    for rank, member in enumerate(members):
        listed = tuple(Member(i, "h", 0, stand_with_root) for i in range(3))
        member.context.collective.world = World.of(member.context.world.version, listed, rank)
    assert train(members, scaled(1.5)) == [None] * 3
    np.testing.assert_equal(members[2].weights(), members[0].weights())


def computed_otherwise(member):
    member.optimizer.param_groups[0].update(foreach=False, fused=False)


@pytest.mark.parametrize(("check_state", "plant"), [("off", scaled(1.5)), ("epoch", computed_otherwise)])
def test_what_nobody_looks_at_goes_on(check_state, plant):
    members = members_of(Trainee, check_state)
    told = told_by(members)
    assert train(members, plant) == [None] * 3
    assert told == []


def test_it_is_compared_each_so_many_steps_and_after_the_last_epoch():
    assert "after step 2 " in train(members_of(Trainee, "2"), scaled(1.5), at=0)[0]
    members = members_of(Trainee)
    told = told_by(members)
    assert train(members, scaled(1.5), at=2, step=1) == [None] * 3
    (line,) = told
    assert line.startswith(f"training has ended after step {3 * STEPS}, and worker 2 holds another state than workers")


def test_a_value_that_differs_is_told_once_and_nobody_ends():
    members = members_of(Trainee, values=lambda *_: {"best": 0.3, "seen": [1]})
    told = told_by(members)

    def plant(member):
        member.state.best = 0.2

    assert train(members, plant, at=0, step=1, epochs=4) == [None] * 3
    (line,) = told
    assert line.startswith(f"after step {STEPS} best is 0.3 on worker 0 and 0.2 on worker 2: is it computed from one ")
    assert members[2].state.best == 0.2


@pytest.mark.parametrize(
    ("plant", "at_end", "named"),
    [
        (lambda script: vars(script.values).update(steps=1.5), id, "4 Values.steps is 0 on worker 0 and 1.5 on"),
        (lambda script: script.counter.add_(1), id, "4 random.numpy differs: is something drawn on one worker only"),
        # As its last epoch has left it: a script may change its model when it has trained, as to write it.
        (id, scaled(1.5), ""),
    ],
)
def test_of_a_plain_loop_streams_and_values_are_compared_too(plant, at_end, named):
    """Two epochs of four steps."""

    def loop(script):
        for _ in range(2):
            for x, y in script.loader:
                script.loss(x, y).backward()
                script.step()
                if (script.worker, script.made) == (1, 2):
                    plant(script)
            np.random.rand(int(script.counter))
        if script.worker:
            at_end(script)

    left, said = run(loop, make=elastic_kit.make_model, samples=32)
    assert said == (None, None)
    assert [line.startswith(f"after step {named}") for line in left[0].job.warnings] == [True] * bool(named)
