"""The elastic sampler under loaders that run ahead of the steps, torch's own among them."""

from collections import deque
from itertools import islice

import pytest
import torch
from elastic_kit import Board, Trainee, make_data, plain_losses, train_together
from hypothesis import given
from hypothesis import strategies as st
from refusal_kit import refused
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from elasticdl.elastic.core.plan import BatchPolicy, Progress, epoch_order
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader, ElasticSampler


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


@given(
    samples=st.integers(1, 120), policy=policies, history=histories, depth=st.integers(1, 7), drop_last=st.booleans()
)
def test_every_sample_once_whatever_the_history_and_the_prefetching(samples, policy, history, depth, drop_last):
    """``drop_last``: but those of the last batch, if it is not full."""
    whole = samples
    if drop_last and policy.fixed:
        whole = samples // policy.global_batch * policy.global_batch
    if not whole:
        refused("are fewer than one global batch of", lambda: make_sampler(samples, policy, drop_last=True))
        return
    used, sizes, abandoned = [], [], []
    members = [make_sampler(samples, policy, drop_last=whole < samples)]
    for version, (workers, committed, torn) in enumerate([*history, (3, samples, 0)], start=1):
        progress = members[0].progress
        members = members[:workers]
        members += [make_sampler(samples, policy, drop_last=whole < samples) for _ in range(workers - len(members))]
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
    assert used == epoch_order(samples, 3, 0)[:whole].tolist()
    assert members[0].progress.step == len(sizes)
    if policy.fixed:
        assert set(sizes[:-1]) <= {policy.global_batch}


def test_the_length_is_the_number_of_steps_in_an_epoch():
    for drop_last, steps in ((False, 4), (True, 3)):
        fixed = make_sampler(50, BatchPolicy(16, None, 4), drop_last=drop_last)
        fixed._job.world = at(1, 0, 3)
        assert len(fixed) == len(DataLoader(range(50), batch_sampler=fixed)) == steps
        fixed._job.progress = Progress(position=48)
        assert fixed.at_end == drop_last
        assert len(fixed) == steps, "of a whole epoch, wherever training stands"
    sampler = make_sampler(50, BatchPolicy(None, 8))
    refused("ask within the function under", lambda: len(sampler))
    for workers, steps in ((1, 7), (3, 3)):
        sampler._job.world = at(1, 0, workers)
        assert len(sampler) == steps


@pytest.mark.parametrize("own_loader", [None, {}])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_any_number_of_workers_has_the_losses_of_plain_torch(workers, drop_last, own_loader):
    """Also with a loader of torch's. 50 samples in batches of 16: the last has 2 samples, so that of 4 workers two have none."""
    for member in train_together(workers, BatchPolicy(16, None, 4), own_loader=own_loader, drop_last=drop_last):
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


def test_how_loaders_and_samplers_are_not_used():
    member = alone()
    for _ in range(2):  # before steps and after
        refused(r"iterate over sampler\.steps\(loader\)", lambda: next(iter(member.loader)), RuntimeError)
        member.train()
    other = DataLoader(member.loader.dataset, batch_sampler=BatchSampler(SequentialSampler(range(50)), 4, False))
    refused("draws from another sampler", lambda: next(alone().sampler.steps(other)))
    forks = alone(num_workers=2, multiprocessing_context="fork")
    refused('multiprocessing_context="forkserver"', lambda: next(forks.steps()))
    refused("has 0 samples", lambda: ElasticSampler(member.context, []))
    what = r"is a generator without len\(\), and what is only iterated over can't be divided"
    refused(what, lambda: ElasticSampler(member.context, (each for each in range(3))))
    loader = ElasticDataLoader(member.context, make_data())
    refused("TorchState", lambda: next(iter(loader)), RuntimeError)


def test_epochs_that_are_counted_by_range_are_refused():
    """The second loop would give nothing, and the training be one epoch long."""
    member = Trainee(0, Board(1), BatchPolicy(16, None))
    losses = []

    def train_by_range():
        for _ in range(2):
            for batch in member.steps():
                member.make_step(batch)
                losses.append(member.state.loss)

    refused(r"no further batch in epoch 1, .* loader.epochs\(n\)", train_by_range)
    assert len(losses) == 4
