"""Whether workers have the same data and make a step on the same samples: told by sums, and in words if not."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import elastic_kit
import numpy as np
import pytest
import torch
from elastic_kit import Trainee
from hypothesis import given
from hypothesis import strategies as st
from keras_benches import KerasTrainee
from refusal_kit import refused
from torch.utils.data import Dataset, Subset, TensorDataset

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy, SampleOrder, checksum_of
from elasticdl.elastic.core.training_step import MOST_MEMBERS, SAMPLES, VOTE_SIZE, BatchFacts, Disagreement, Vote, mark
from elasticdl.elastic.training.data_facts import TRAINING, DataFacts, Source


def summed(checksums):
    """As a collective sums votes: in float32."""
    ballots = np.zeros((len(checksums), VOTE_SIZE), np.float32)
    ballots[:, SAMPLES] = 1.0
    for ballot, checksum in zip(ballots, checksums, strict=True):
        mark(ballot, checksum, 0)
    return ballots.sum(axis=0, dtype=np.float32)


@given(st.integers(0, 2**32 - 1), st.integers(2, 50), st.integers(0, 29), st.integers(0, 10**6))
def test_one_that_differs_in_one_bit_is_seen(checksum, members, bit, who):
    same = [checksum] * members
    assert Vote.of(summed(same)).one_batch
    same[who % members] ^= 1 << bit
    assert not Vote.of(summed(same)).one_batch


def test_sums_are_exact_for_as_many_members_as_are_promised():
    most = [2**32 - 1] * MOST_MEMBERS
    assert Vote.of(summed(most)).one_batch
    assert not Vote.of(summed([*most[:-1], 2**32 - 2])).one_batch


def test_the_same_samples_have_the_same_checksum_in_whatever_they_come():
    assert checksum_of(np.arange(5)) == checksum_of(range(5)) != checksum_of([0, 2, 1, 3, 4])
    assert checksum_of(["a", "b"]) == checksum_of(("a", "b")) != checksum_of(["b", "a"])
    # What is printed with its address is another in each process.
    assert checksum_of([object(), object()]) == checksum_of([object(), object()])


@pytest.mark.parametrize(
    ("epoch", "samples", "said"),
    [
        (0, [5, 3, 9], "different batches: from sample 2 of 3 on they differ, sample 4 of the data and sample 3"),
        (1, [5, 4, 9], "batches of different epochs, 1 and 2"),
        (0, [5, 4], "batches of different sizes, 3 and 2 samples"),
    ],
)
def test_the_first_difference_is_named_with_two_workers(epoch, samples, said):
    mine, same = (BatchFacts.of(worker, 0, 7, [5, 4, 9]) for worker in (0, 1))
    found = Disagreement.of([mine, same, BatchFacts.of(2, epoch, 7, samples)])
    assert found.line.startswith(f"step 7: worker 0 and worker 2 have {said}: all workers must draw the same samples")
    assert not found.refused


@pytest.mark.parametrize(("kind", "policy"), [(Trainee, BatchPolicy(None, 4, 2)), (KerasTrainee, BatchPolicy(8, None))])
def test_a_worker_with_another_order_of_samples_is_found_in_the_first_step(kind, policy):
    board = elastic_kit.Board(3)
    members = [kind(rank, board, policy) for rank in range(3)]
    members[2].loader.sampler.order = replace(members[2].loader.sampler.order, seed=1)
    before = members[0].weights()
    said = elastic_kit.in_threads(lambda member: refused("step 1", member.train), members)
    assert said[0].startswith("step 1: worker 3 and worker 3 have different batches: from sample 1 of")
    assert len({*said}) == 1
    np.testing.assert_equal(members[0].weights(), before)


@pytest.mark.parametrize("epoch", [0, 1])
def test_data_that_differ_are_found_in_the_first_step_or_in_the_next_epoch_if_one_worker_makes_labels_anew(epoch):
    board = elastic_kit.Board(2)
    members = [Trainee(rank, board, BatchPolicy(8, None)) for rank in range(2)]

    def work(member):
        data, rank = Files(), member.context.world.rank
        member.state.sources = [Source.of(TRAINING, data)]
        for number in member.loader.epochs(3):
            if number == epoch and rank == 1:
                data.targets[:] = [label + 1 for label in data.targets]
            for batch in member.loader:
                member.make_step(batch)
                member.state.commit()
                data.cache[0] = rank  # none of the data

    words = "worker 3 and worker 3 have different data: in its training data sample 1 is "
    elastic_kit.in_threads(lambda member: refused(words, lambda: work(member)), members)
    assert [member.state.progress.epoch for member in members] == [epoch] * 2


def numbers(samples=100, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(samples, 3, 4)).astype(np.float32), generator.integers(0, 10, samples)


def tensors(samples=100, seed=0):
    return TensorDataset(*map(torch.from_numpy, numbers(samples, seed)))


class Files(Dataset):
    """As most data sets of images are; it is not asked for samples, as it may draw, count, or open a file."""

    def __init__(self, folder="/data", numbers=range(100)):
        self.files = [f"{folder}/train/{i}.png" for i in numbers]
        self.targets = [i % 3 for i in numbers]
        self.weights = np.linspace(0, 1, len(self.files))
        self.cache = [None] * len(self.files)
        self.itself: object = self

    def __len__(self):
        return len(self.files)


class Rounded(Files):
    """In another folder of its host."""

    def __init__(self, by=0.0):
        super().__init__("/local/ssd1")
        self.weights = np.nextafter(self.weights, 2.0) + by


IMAGES = np.zeros((50, 28, 28), np.uint8)  # whose corners are all the same
IMAGES[:, 14, 14] = range(50)


@pytest.mark.parametrize(
    ("mine", "job", "said"),
    [
        *((make(), make(), "") for make in (tensors, Files, numbers, lambda: Subset(tensors(), [5, 3, 9]), lambda: 17)),
        (Rounded(), Files(), ""),
        (tensors(960), tensors(640), "its training data have 960 samples, the job's 640"),
        (tensors(seed=1), tensors(), "in its training data sample 1 is (0.3456, "),
        (Subset(tensors(), [5, 9, 3]), Subset(tensors(), [5, 3, 9]), "in its training data sample 2 is 9 (indices), the job's 3"),
        (Files(numbers=[1, 3, 2]), Files(numbers=[1, 2, 3]), "in its training data sample 2 is '3.png' (files), the job's '2.png'"),
        (Rounded(0.1), Files(), "in its training data sample 1 is 0.1 (weights), the job's 0"),
        (TensorDataset(tensors().tensors[0].double()), tensors(), "in its training data a sample is float64 (3, 4) (te"),
        ([*IMAGES[1:], IMAGES[0]], [*IMAGES], "in its training data sample 1 is (0, 0, 0, 0, 0.001276) (row), the job's (0, 0, 0, 0, 0)"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named_and_the_same_data_read_twice_have_none(mine, job, said):
    found = Source.of(TRAINING, mine).differs(Source.of(TRAINING, job))
    assert found.startswith(said) if said else not found


def facts(data=range(24), batch=8, shape="(2, 3)", **order):
    source = replace(Source.of(TRAINING, data), batch=batch)
    sample_order = SampleOrder(len(data), BatchPolicy(8, None), 0, **order)
    return DataFacts.of(BatchPolicy(8, None), sample_order, [source], {"w": shape})


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (facts(), None),
        (facts(range(1, 25)), "in its training data sample 1 is 1 (row), the job's 0: every worker must read the same"),
        (facts(range(25)), "its training data have 25 samples, the job's 24: every worker must read the same"),
        (facts(batch=12), "its loader of training data has the batch size 12, the job's 8: every worker must"),
        (facts(shuffle=False), "its shuffle is False, the job's True: "),
        (facts(shape="(2, 4)"), "its model's parameter w is (2, 4), the job's (2, 3): every worker must make the same model"),
    ],
)  # fmt: skip
def test_who_has_other_data_or_another_model_than_the_job_is_refused_before_a_world(mine, said):
    mine.require_same(b"")  # nobody has trained yet
    with contextlib.nullcontext() if said is None else pytest.raises(UserError, match=re.escape(f"refused: {said}")):
        mine.require_same(facts().to_bytes())
