"""The library's loop: its sampler under loaders that run ahead of the steps, torch's own among them; a schedule wherever its world breaks."""

from collections import deque
from itertools import islice

import pytest
import torch
from elastic_kit import Board, Trainee, in_threads, make_data, make_model, on_one_device
from front_ends import STEPS, Script
from hypothesis import given
from hypothesis import strategies as st
from job_kit import Job
from loop_benches import LibraryLoop
from refusal_kit import refused
from session_kit import lose_world
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import WHOLE, BatchPolicy, Progress, epoch_order
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
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
        self.spread = WHOLE

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
        fixed._job.world, fixed._job.progress = at(1, 0, 3), Progress(position=48)
        assert fixed.at_end == drop_last
        assert len(fixed) == len(DataLoader(range(50), batch_sampler=fixed)) == steps, "of a whole epoch"
    sampler = make_sampler(50, BatchPolicy(None, 8))
    refused("ask within the function under", lambda: len(sampler))
    for workers, steps in ((1, 7), (3, 3)):
        sampler._job.world = at(1, 0, workers)
        assert len(sampler) == steps


@pytest.mark.parametrize("drop_last", [False, True])
def test_with_a_loader_of_torchs_workers_have_the_losses_of_plain_torch(drop_last):
    """50 samples in batches of 16: the last has 2 samples, so that of 4 workers two have none."""
    board, losses = Board(4), on_one_device(make_model(), make_data(), 16, drop_last=drop_last)
    given = {"own_loader": {}, "drop_last": drop_last}
    members = [Trainee(rank, board, BatchPolicy(16, None, 4), **given) for rank in range(4)]
    in_threads(lambda member: member.train(2), members)
    for member in members:
        torch.testing.assert_close(member.losses, losses, rtol=2e-5, atol=1e-6)


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


def iterated(member):
    next(iter(member.loader))


def of_another_sampler(member):
    other = DataLoader(member.loader.dataset, batch_sampler=BatchSampler(SequentialSampler(range(50)), 4, False))
    next(member.sampler.steps(other))


def counted_by_range(member):
    """The second loop would give nothing, and the training be one epoch long."""
    for _ in range(2):
        for batch in member.steps():
            member.make_step(batch)


def gone_through_twice(member):
    batch = next(member.steps())
    for _ in range(2):
        list(batch)


def followed_by_a_later_one(member):
    batch, _ = islice(member.steps(), 2)
    list(batch)


def in_a_later_world(member):
    batch = next(steps := member.steps())
    lose_world(member.context)
    list(batch)
    steps.close()


@pytest.mark.parametrize(
    ("use", "words", "options"),
    [
        (iterated, r"iterate over sampler\.steps\(loader\)", {}),
        (of_another_sampler, "draws from another sampler", {}),
        (lambda member: next(member.steps()), 'context="forkserver"', {"num_workers": 1, "multiprocessing_context": "fork"}),
        (lambda member: ElasticSampler(member.context, []), "has 0 samples", {}),
        (lambda member: ElasticSampler(member.context, iter(())), r"without len\(\), and what is only iterated over can't", {}),
        (lambda member: next(iter(ElasticDataLoader(member.context, make_data()))), "TorchState", {}),
        (gone_through_twice, r"step 1 are loaded once.*keep what is needed again in a list", None),
        (followed_by_a_later_one, r"the batch of step 1 is over.*before the next is fetched", None),
        (in_a_later_world, "the workers have changed", None),
        (counted_by_range, r"no further batch in epoch 1, .* loader.epochs\(n\)", None),
    ],
)  # fmt: skip
def test_how_loaders_and_samplers_are_not_used(use, words, options):
    member = Trainee(0, Board(1), BatchPolicy(16, None, 4), own_loader=options)
    refused(words, lambda: use(member), (UserError, RuntimeError))


# -- weights, learning rate, schedule and values go back together, wherever in an epoch the world breaks --


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)


def by_epochs(optimizer):
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Scheduled(LibraryLoop):
    """``each_step``: else the scheduler goes on behind each epoch. ``every``: it commits each so many steps. ``breaks_in``: behind this epoch."""

    def __init__(self, make, each_step, every=1, breaks_in=None):
        super().__init__(Script())
        self.scheduler, self.each_step, self.every, self.breaks_in = make(self.optimizer), each_step, every, breaks_in
        self.values = {"scheduler": self.scheduler, "seen": 0}
        self.settings = {}  # by step: with what it was made

    def make_epochs(self, loader):
        for epoch in loader.epochs(2):
            for batch in loader:
                self.make_step(batch)
            if self.breaks_in == epoch:  # as an evaluation would
                self.breaks_in = None
                raise WorldBroken("a worker is lost")
            if not self.each_step:
                self.scheduler.step()

    def make_step(self, batch):
        group, step = self.optimizer.param_groups[0], batch.plan.step
        self.settings[step] = (float(group["lr"]), float(group["momentum"]))
        for x, y in batch:
            batch.backward(cross_entropy(self.model(x), y))
        self.optimizer.step()
        self.state.seen += batch.plan.batch
        if self.each_step:
            self.scheduler.step()
        if step % self.every == 0:
            self.state.commit()


def result_of(script, torn=()):
    job = Job(1, {(0, step): "torn" for step in torn})
    job.keeps_states = False
    assert job.run(lambda _: script.train(job))[0] == (None,)
    weights = [each.tolist() for each in script.model.parameters()]
    return script.settings, script.optimizer.param_groups[0]["lr"], script.state.seen, script.state.progress, weights


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("make", "each_step"), [(by_epochs, False), (one_cycle, True)])
def test_a_schedule_is_that_of_an_undisturbed_run_wherever_the_world_breaks(make, each_step, every):
    expected = result_of(Scheduled(make, each_step))
    assert len({rate for rate, _ in expected[0].values()}) > 1
    for torn in range(1, 2 * STEPS + 1):
        assert result_of(Scheduled(make, each_step, every), [torn]) == expected, f"in step {torn}"
    for epoch in range(2):
        assert result_of(Scheduled(make, each_step, every, epoch)) == expected, f"behind epoch {epoch}"
