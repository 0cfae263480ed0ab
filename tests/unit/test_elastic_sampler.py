"""The elastic sampler under loaders that run ahead of the steps, torch's own among them."""

from collections import deque
from dataclasses import replace
from itertools import chain, islice

import pytest
import torch
from elastic_kit import Board, Trainee, plain_losses, train_together
from hypothesis import given
from hypothesis import strategies as st
from refusal_kit import refused
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy, Progress, epoch_order, equal_shares
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.torch_kit.loaders import ElasticSampler
from elasticdl.elastic.torch_kit.own_loader import OwnLoader, PartsAhead


def nothing(*_, **__): ...


class Host:
    """One worker's job as the sampler sees it."""

    device = torch.device("cpu")
    advance = begin = batches_over = plan_total = epoch_ended = nothing

    def __init__(self, policy, seed):
        self.policy, self.seed = policy, seed
        self.world = None
        self.progress = Progress()

    @property
    def has_world(self):
        return self.world is not None


class NoGradients:
    open = drop_gradients = begin_passes = reset_buffers = nothing


class Ahead:
    """A loader that has always fetched so many micro-batches more than were asked for; its items are the indices."""

    def __init__(self, sampler, depth):
        self.sampler, self.depth = sampler, depth

    def __iter__(self):
        source = iter(self.sampler)
        fetched = deque(islice(source, self.depth))
        while fetched:
            fetched.extend(islice(source, 1))
            yield fetched.popleft()


def make_sampler(samples, policy, seed=3, drop_last=False):
    sampler = ElasticSampler(Host(policy, seed), samples, drop_last=drop_last)
    sampler.attach(NoGradients(), lambda backward: None)
    return sampler


def at(version, rank, workers):
    return World.of(version, tuple(Member(i, "h", 0, True) for i in range(workers)), rank)


policies = st.one_of(
    st.builds(BatchPolicy, st.integers(1, 50), st.none(), st.one_of(st.none(), st.integers(1, 9))),
    st.builds(BatchPolicy, st.none(), st.integers(1, 12), st.one_of(st.none(), st.integers(1, 9))),
)
# Worlds in a row: how many workers, how many of their steps are committed, and how many of them begin a torn one.
histories = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4), st.integers(0, 6)), max_size=8)


@given(samples=st.integers(1, 120), policy=policies, history=histories, depth=st.integers(1, 7))
def test_every_sample_once_whatever_the_history_and_the_prefetching(samples, policy, history, depth):
    used, sizes, abandoned = [], [], []
    members = [make_sampler(samples, policy)]
    for version, (workers, committed, torn) in enumerate([*history, (3, samples, 0)], start=1):
        progress = members[0].progress
        members = members[:workers] + [make_sampler(samples, policy) for _ in range(workers - len(members))]
        for rank, sampler in enumerate(members):
            sampler._job.world = at(version, rank, workers)
            sampler._job.progress = progress  # newcomers have it from the state of rank 0
        worlds = [sampler.steps(Ahead(sampler, depth)) for sampler in members]
        for batches in islice(zip(*worlds, strict=True), committed):
            while abandoned:  # the garbage collector comes to them as late as this
                abandoned.pop().close()
            step = [index for batch in batches for micro_batch in batch for index in micro_batch]
            used += step
            sizes.append(len(step))
            for sampler, batch in zip(members, batches, strict=True):
                sampler._job.progress = batch.plan.after
        for steps in worlds[:torn]:
            list(next(steps, ()))
        abandoned += worlds
    assert used == epoch_order(samples, 3, 0).tolist()
    assert members[0].progress.step == len(sizes)
    if policy.fixed:
        assert set(sizes[:-1]) <= {policy.global_batch}


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 4), (True, 3)])
def test_the_length_is_the_number_of_steps_in_an_epoch(drop_last, steps):
    fixed = make_sampler(50, BatchPolicy(16, None, 4), drop_last=drop_last)
    fixed._job.world = at(0, 0, 1)
    loader = DataLoader(range(50), batch_sampler=fixed)
    for workers in (1, 3):
        fixed._job.world = at(1, 0, workers)
        assert len(fixed) == len(loader) == len(list(fixed.steps(Ahead(fixed, 1)))) == steps
        assert not fixed.at_end
    fixed._job.progress = Progress(position=48)
    assert fixed.at_end == drop_last
    assert len(fixed) == steps, "of a whole epoch, wherever training stands"


def test_the_length_with_a_batch_per_worker_is_that_of_the_present_workers():
    sampler = make_sampler(50, BatchPolicy(None, 8))
    refused("ask within the function under", lambda: len(sampler))
    for workers, steps in ((1, 7), (3, 3)):
        sampler._job.world = at(1, 0, workers)
        assert len(sampler) == steps


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_a_loader_of_torch_gives_the_losses_of_plain_torch(workers, drop_last):
    # 50 samples in batches of 16: the last has 2 samples, so that of 4 workers two have none
    for member in train_together(workers, BatchPolicy(16, None, 4), own_loader={}, drop_last=drop_last):
        torch.testing.assert_close(member.losses, plain_losses(16, drop_last=drop_last), rtol=2e-5, atol=1e-6)


def alone(**own_loader):
    return Trainee(0, Board(1), BatchPolicy(16, None, 4), own_loader=own_loader)


class Noise(Dataset):
    """A random draw for each sample, in whatever process loads it."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(1), 0


def test_draws_of_loading_processes_are_repeated_with_the_step():
    draws = []
    for seed in (0, 0, 1):
        sampler = make_sampler(8, BatchPolicy(4, None), seed)
        sampler._job.world = at(1, 0, 1)
        torch.rand(len(draws))  # whatever was drawn before
        loader = DataLoader(Noise(), batch_sampler=sampler, num_workers=1, multiprocessing_context="forkserver")
        draws.append([inputs.tolist() for batch in sampler.steps(loader) for inputs, _ in batch])
    assert draws[0] == draws[1] != draws[2]


def test_iterating_over_the_loader_itself_is_an_error():
    member = alone()
    with pytest.raises(RuntimeError, match=r"iterate over sampler\.steps\(loader\)"):
        next(iter(member.loader))
    for batch in member.steps():
        member.make_step(batch)
    with pytest.raises(RuntimeError, match=r"iterate over sampler\.steps\(loader\)"):
        next(iter(member.loader))


def test_a_loader_over_another_sampler_or_that_would_fork_is_refused():
    member = alone(num_workers=2, multiprocessing_context="fork")
    other = DataLoader(member.loader.dataset, batch_sampler=BatchSampler(SequentialSampler(range(50)), 4, False))
    refused("draws from another sampler", lambda: next(member.sampler.steps(other)))
    refused('multiprocessing_context="forkserver"', lambda: next(member.steps()))


def test_a_sampler_over_nothing_or_a_stream_is_refused():
    refused("has 0 samples", lambda: ElasticSampler(alone().context, []))
    with pytest.raises(
        UserError, match=r"is a generator without len\(\), and what is only iterated over can't be divided"
    ):
        ElasticSampler(alone().context, (each for each in range(3)))


@pytest.mark.parametrize("own_loader", [None, {}])
def test_epochs_that_are_counted_by_range_are_refused(own_loader):
    """The second loop would give nothing, and the training be one epoch long."""
    member = Trainee(0, Board(1), BatchPolicy(16, None), own_loader=own_loader)
    losses = []

    def train_by_range():
        for _ in range(2):
            for batch in member.steps():
                member.make_step(batch)
                losses.append(member.state.loss)

    refused(r"no further batch in epoch 1, .* loader.epochs\(n\)", train_by_range)
    assert len(losses) == 4


def ours(stands):
    sampler = make_sampler(50, BatchPolicy(16, None))
    sampler.order = replace(sampler.order, shuffle=False)
    sampler._job.progress = Progress(position=16 * stands, step=stands)
    return sampler


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("stands", [0, 2, 4])
def test_a_cursor_gives_the_batches_that_are_left_divided_among_the_workers(stands, workers):
    cursor = ours(stands)
    wholes = [list(range(50))[start : start + 16] for start in range(0, 50, 16)][stands:]
    for _ in range(2):  # it is not moved on by asking
        plans = list(cursor.batches(workers))
        assert [list(plan.whole) for plan in plans] == wholes
        assert [plan.shares for plan in plans] == [equal_shares(len(whole), workers) for whole in wholes]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("stands", [0, 2])
def test_a_cursor_in_a_scripts_own_loader_loads_the_parts_that_are_left(stands, workers):
    loader = OwnLoader(DataLoader(range(48), batch_size=16, collate_fn=list))
    order = loader.of_epoch(0)
    members = tuple(Member(rank, "h", 0, False) for rank in range(workers))
    found = []
    for rank in range(workers):
        cursor = PartsAhead(loader, order, lambda batch, rank=rank: batch.plan(workers).whole_run(rank))
        found.append([cursor.take(number, World.of(1, members, rank)) for number in range(stands, 3)])
    wholes = [list(chain(*parts)) for parts in zip(*found, strict=True)]
    assert wholes == [list(range(start, start + 16)) for start in (0, 16, 32)][stands:]
