"""Whether workers make a step on the same samples, told by sums alone, and in words if not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import elastic_keras_kit
import elastic_kit
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.common.errors import UserError
from elasticdl.elastic.core import agreement
from elasticdl.elastic.core.agreement import BatchFacts, Disagreement, checksum_of
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.vote import SAMPLES, VOTE_SIZE, Vote, mark
from elasticdl.elastic.training.data_facts import TRAINING, Source
from elasticdl.tensorflow import keras


def summed(checksums: list[int]) -> np.ndarray:
    """As a collective sums votes: in float32."""
    ballots = []
    for checksum in checksums:
        ballot = [0.0] * VOTE_SIZE
        ballot[SAMPLES] = 1.0
        mark(ballot, checksum, 0)
        ballots.append(ballot)
    return np.array(ballots, np.float32).sum(axis=0, dtype=np.float32)


@given(st.integers(0, 2**32 - 1), st.integers(1, 50), st.integers(0, 29), st.integers(0, 10**6))
def test_one_that_differs_in_one_bit_is_seen(checksum, members, bit, who):
    same = [checksum] * members
    assert Vote.of(summed(same)).one_batch
    if members > 1:
        other = [*same]
        other[who % members] ^= 1 << bit
        assert not Vote.of(summed(other)).one_batch


def test_sums_are_exact_for_as_many_members_as_are_promised():
    most = [2**32 - 1] * agreement.MOST_MEMBERS
    assert Vote.of(summed(most)).one_batch
    assert not Vote.of(summed([*most[:-1], 2**32 - 2])).one_batch


def test_the_same_samples_have_the_same_checksum_in_whatever_they_come():
    assert checksum_of(np.arange(5, dtype=np.int64)) == checksum_of([0, 1, 2, 3, 4]) == checksum_of(range(5))
    assert checksum_of([0, 2, 1, 3, 4]) != checksum_of(range(5))
    assert checksum_of(["a", "b"]) == checksum_of(("a", "b")) != checksum_of(["b", "a"])
    # What is printed with its address is another in each process.
    assert checksum_of([object(), object()]) == checksum_of([object(), object()])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            BatchFacts.of(2, 0, 7, [5, 3, 9]),
            "worker 0 and worker 2 have different batches: from sample 2 of 3 on they differ, sample 4 of the data and sample 3",
        ),
        (BatchFacts.of(2, 1, 7, [5, 4, 9]), "worker 0 and worker 2 have batches of different epochs, 1 and 2"),
        (BatchFacts.of(2, 0, 7, [5, 4]), "worker 0 and worker 2 have batches of different sizes, 3 and 2 samples"),
    ],
)
def test_the_first_difference_is_named_with_two_workers(other, said):
    mine = BatchFacts.of(0, 0, 7, [5, 4, 9])
    found = Disagreement.of([mine, BatchFacts.of(1, 0, 7, [5, 4, 9]), other])
    assert found.line.startswith(f"step 7: {said}: all workers must draw the same samples in the same order")
    assert not found.refused


def test_who_has_come_later_and_alone_differs_is_refused_alone():
    def facts(worker, samples, trained):
        return BatchFacts.of(worker, 0, 7, samples, trained=trained)

    root, other = facts(0, [5, 4], trained=True), facts(1, [5, 4], trained=True)
    found = Disagreement.of([root, other, facts(2, [5, 4], trained=False), facts(3, [4, 5], trained=False)])
    assert found.refused == (3,)
    assert found.line.startswith("step 7: worker 0 and worker 3 have different batches: from sample 1")
    # Of those who have trained together, nobody knows who is wrong.
    assert not Disagreement.of([root, facts(1, [4, 5], trained=True), facts(3, [4, 5], trained=False)]).refused
    assert not Disagreement.of([facts(0, [5, 4], trained=False), facts(1, [4, 5], trained=False)]).refused


def lines_of(members):
    """What each of them ends with, all training at once."""

    def said(member):
        try:
            member.train()
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(members)) as pool:
        return set(pool.map(said, members, timeout=120))


def weights(member):
    model = member.model
    return model.get_weights() if isinstance(model, keras.Model) else [each.tolist() for each in model.parameters()]


@pytest.mark.parametrize("policy", [BatchPolicy(8, None), BatchPolicy(None, 4, 2)], ids=["global", "per worker"])
@pytest.mark.parametrize("kit", [elastic_kit, elastic_keras_kit], ids=["torch", "keras"])
def test_a_worker_with_another_order_of_samples_is_found_in_the_first_step(kit, policy):
    board = kit.Board(3)
    members = [kit.Trainee(rank, board, policy) for rank in range(3)]
    members[2].loader.sampler.order = replace(members[2].loader.sampler.order, seed=1)
    before = weights(members[0])
    (line,) = lines_of(members)
    assert line.startswith("step 1: worker 3 and worker 3 have different batches: from sample 1 of")
    np.testing.assert_equal(weights(members[0]), before)


@pytest.mark.parametrize("kit", [elastic_kit, elastic_keras_kit], ids=["torch", "keras"])
@pytest.mark.parametrize("by", [0.1, 1e-6])
def test_data_that_differ_are_found_in_the_first_step_of_a_world(kit, by):
    """As under Lightning, whose loaders are not known when a worker comes in. Rounding is none."""
    board = kit.Board(2)
    members = [kit.Trainee(rank, board, BatchPolicy(8, None)) for rank in range(2)]
    labels = np.linspace(0, 1, 50)
    for member, data in zip(members, (labels, labels * (1 + by)), strict=True):
        member.state.sources = [Source.of(TRAINING, data)]
    (line,) = lines_of(members)
    expected = "step 1: worker 3 and worker 3 have different data: in its training data sample" if by > 1e-3 else ""
    assert line.startswith(expected)
    assert bool(line) == bool(expected)
