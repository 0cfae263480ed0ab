"""What differs between the states of workers is named, or mended if it is no more than rounding."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import elastic_keras_kit
import elastic_kit
import numpy as np
import pytest
import torch

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.batch_plan import BatchPolicy
from elasticdl.elastic.training.pieces import as_array, leaves
from elasticdl.elastic.training.state_check import ROUNDING
from elasticdl.tensorflow import keras

POLICY = BatchPolicy(16, None)


def members_of(kit, check_state="epoch", **options):
    board = kit.Board(3)
    return [kit.Trainee(rank, board, POLICY, check_state=check_state, **options) for rank in range(3)]


def train(members, plant=lambda member: None, epochs=3, at=1):
    """``plant`` is done on rank 2 before this epoch. Returns what each member ends with: None, or what it says."""

    def work(member):
        try:
            for epoch in member.loader.epochs(epochs):
                if epoch == at and member.context.rank == 2:
                    plant(member)
                for batch in member.loader:
                    (member.state if isinstance(member.model, keras.Model) else member).make_step(batch)
                    member.state.commit()
        except UserError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(work, members, timeout=200))


def weights(member):
    model = member.model
    return (
        model.get_weights()
        if isinstance(model, keras.Model)
        else [each.tolist() for each in model.state_dict().values()]
    )


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


KITS = pytest.mark.parametrize("kit", [elastic_kit, elastic_keras_kit], ids=["torch", "keras"])


@KITS
@pytest.mark.parametrize(
    ("plant", "named"),
    [
        (scaled(1.01), {"torch": "model.0.weight differs by 0.01", "keras": "/kernel"}),
        (other_rate, {"torch": "optimizer.param_groups.0.lr", "keras": "learning_rate"}),
    ],
    ids=["weight", "rate"],
)
def test_a_piece_that_differs_ends_the_job_after_the_first_step_of_the_epoch(kit, plant, named):
    members = members_of(kit)
    (line,) = set(train(members, plant))
    steps = members[0].state.step
    assert line.startswith(f"after step {steps} worker 3 and worker 3 hold different states: ")
    assert named["torch" if kit is elastic_kit else "keras"] in line
    assert "after step 0 they were the same" in line
    assert steps == -(-len(members[0].loader.sampler.order._of_epoch(0)) // 16) + 1


def test_a_statistic_of_batch_norm_is_named():
    def plant(member):
        member.model[1].running_mean += 1.0

    (line,) = set(train(members_of(elastic_kit, batch_norm=True), plant))
    assert "model.1.running_mean differs" in line


@KITS
def test_rounding_is_mended_and_told_once(kit):
    members = members_of(kit)
    told = []
    members[0].state._check._tell = told.append
    assert train(members, scaled(1 + 2**-22)) == [None] * 3
    assert len(told) == 1
    assert "all have taken rank 0's" in told[0]
    for other in members[1:]:
        np.testing.assert_equal(weights(other), weights(members[0]))


@KITS
def test_whatever_differs_can_be_repaired(kit):
    members = members_of(kit, "repair")
    assert train(members, scaled(1.5)) == [None] * 3
    np.testing.assert_equal(weights(members[2]), weights(members[0]))


def test_what_nobody_looks_at_goes_on():
    members = members_of(elastic_kit, "off")
    assert train(members, scaled(1.5)) == [None] * 3
    assert weights(members[2]) != weights(members[0])


def test_it_can_be_looked_at_each_so_many_steps():
    members = members_of(elastic_kit, "2")
    lines = train(members, scaled(1.5), at=0)
    assert lines[0] is not None
    assert members[0].state.step == 1, "the first step of a world is one of them"
    members = members_of(elastic_kit, "1")
    assert train(members, epochs=1) == [None] * 3


def test_the_bound_is_above_what_rounding_makes_of_a_step():
    assert 2**-23 < ROUNDING < 0.01


def test_all_that_is_nested_has_a_name():
    value = {"state": {0: {"step": 3}}, "groups": [{"lr": 0.1, "foreach": None}]}
    assert leaves({"optimizer": value}) == {
        "optimizer.state.0.step": 3,
        "optimizer.groups.0.lr": 0.1,
        "optimizer.groups.0.foreach": None,
    }
    assert as_array(lambda: 0).tolist() == as_array(lambda: 1).tolist(), "its address is another in each process"
