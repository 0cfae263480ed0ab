"""Hooks that a script registers on parameters are called as with DistributedDataParallel: within each backward pass, on this worker's part."""

import pytest
import torch
from elastic_kit import Board, PlainScript, Trainee, in_threads, make_data, make_model, plain_losses
from test_elastic_lightning_manual import Member as ManualMember
from test_elastic_loop_torn import compare
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.torch_kit import reducer as buckets

pytestmark = pytest.mark.filterwarnings("ignore")


def halve(parameter):
    """In place, once the gradient of a pass is accumulated."""
    parameter.grad.mul_(0.5)


def mask(model):
    """Right on each part, as each hook is linear."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * (torch.arange(gradient.numel()) % 2).view_as(gradient))


def mask_and_halve(model):
    mask(model)
    next(model.parameters()).register_post_accumulate_grad_hook(halve)


@pytest.mark.parametrize("bucket_bytes", [1, buckets.BUCKET_BYTES])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_loop_over_the_librarys_batches(monkeypatch, workers, bucket_bytes):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
    board = Board(workers)
    members = [Trainee(rank, board, BatchPolicy(16, None, None)) for rank in range(workers)]
    for member in members:
        mask_and_halve(member.model)
    in_threads(lambda member: member.train(2), members)
    for member in members:
        torch.testing.assert_close(member.losses, plain_losses(16, prepare=mask_and_halve), rtol=2e-5, atol=1e-6)


def loop(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def accumulate(model, optimizer, loader):
    for number, (x, y) in enumerate(loader):
        (cross_entropy(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


def make_plain(rank=None, board=None):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make_data(), batch_size=8)
    script = PlainScript(rank, board, model, optimizer, loader) if board else None
    return model, optimizer, script.loader if script else loader, script


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("train", "prepare"), [(loop, mask_and_halve), (accumulate, mask)])
def test_a_plain_loop(workers, train, prepare):
    alone, *others, _ = make_plain()
    prepare(alone)
    train(alone, *others)
    board = Board(workers)

    def run(member):
        model, optimizer, loader, _ = member
        prepare(model)
        train(model, optimizer, loader)
        return [each.detach() for each in model.parameters()]

    for found in in_threads(run, [make_plain(rank, board) for rank in range(workers)]):
        torch.testing.assert_close(found, list(alone.parameters()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_step_in_a_hook_is_refused(workers):
    def run(member):
        model, optimizer, loader, _ = member
        model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.raises(
            UserError,
            match=r"^gradients were .* or used, as by optimizer\.step\(\) in a hook, or changed",
        ):
            loop(model, optimizer, loader)

    board = Board(workers)
    in_threads(run, [make_plain(rank, board) for rank in range(workers)])


def trains_with_hooks(member):
    mask(member.model)
    for x, y in member.loader:
        member.loss(x, y).backward()
        member.step()


def test_a_step_that_is_torn():
    assert not compare(trains_with_hooks).warnings


def test_manual_optimization_calls_them_in_each_pass():
    batches = torch.randn(14, 12, 3, generator=torch.Generator().manual_seed(1))

    def train(workers):
        board = Board(workers)
        members = [ManualMember(rank, board) for rank in range(workers)]
        for member in members:
            mask(torch.nn.ModuleList([member.first, member.second]))
        return in_threads(lambda each: each.train(batches)[0], members)

    (alone,) = train(1)
    for ours in train(2):
        torch.testing.assert_close(ours, alone)
