"""Hooks that a script registers on parameters are called on the gradient of the global batch, by any number of workers."""

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
from elasticdl.elastic.torch_kit.gradients import ParameterHooks

pytestmark = pytest.mark.filterwarnings("ignore")


class Hooks:
    """Of each kind, none of them linear but one; two come and go while a model trains."""

    def __init__(self, model, after=True):
        self.passes = 0
        first, *_, self.last = model.parameters()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
            parameter.register_hook(lambda gradient: gradient.maximum(gradient * 0.5))
            parameter.register_hook(self._shrink)
        if after:
            first.register_post_accumulate_grad_hook(self._turn)
        self.once = self.last.register_hook(self._count)

    @staticmethod
    def _shrink(gradient):
        """In place."""
        gradient.div_(1 + gradient.norm())

    @staticmethod
    def _turn(parameter):
        parameter.grad.abs_()

    def _count(self, gradient):
        self.passes += 1
        if self.passes == 2:
            self.once.remove()
            self.once = self.last.register_hook(self._count)
        if self.passes == 5:
            self.once.remove()
        return gradient * (1 + self.passes)


@pytest.mark.parametrize("bucket_bytes", [1, buckets.BUCKET_BYTES])
@pytest.mark.parametrize(("workers", "bound"), [(1, None), (1, 4), (2, None), (3, 4)])
def test_a_loop_over_the_librarys_batches(monkeypatch, workers, bound, bucket_bytes):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
    board = Board(workers)
    members = [Trainee(rank, board, BatchPolicy(16, None, bound)) for rank in range(workers)]
    hooks = [Hooks(member.model) for member in members]
    in_threads(lambda member: member.train(2), members)
    for member in members:
        torch.testing.assert_close(member.losses, plain_losses(16, prepare=Hooks), rtol=2e-5, atol=1e-6)
    assert [each.passes for each in hooks] == [5] * workers


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


def mask(model):
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * (torch.arange(gradient.numel()) % 2).view_as(gradient))


def make_plain(rank=None, board=None):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make_data(), batch_size=8)
    script = PlainScript(rank, board, model, optimizer, loader) if board else None
    return model, optimizer, script.loader if script else loader, script


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(("train", "prepare", "warns"), [(loop, Hooks, False), (accumulate, mask, True)])
def test_a_plain_loop(workers, train, prepare, warns):
    alone, *others, _ = make_plain()
    prepare(alone)
    train(alone, *others)
    board, told = Board(workers), []

    def run(member):
        model, optimizer, loader, script = member
        script.context.warn = told.append
        prepare(model)
        train(model, optimizer, loader)
        return [each.detach() for each in model.parameters()]

    for found in in_threads(run, [make_plain(rank, board) for rank in range(workers)]):
        torch.testing.assert_close(found, list(alone.parameters()), rtol=1e-4, atol=1e-5)
    assert len(told) == warns * workers
    assert all("is called once a step, with the sum of its 2 backward passes" in line for line in told)


def backward_alone(model, loader):
    for x, y in loader:
        cross_entropy(model(x), y).backward()


def test_a_step_in_a_hook_is_refused():
    model, optimizer, loader, _ = make_plain(0, Board(1))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(UserError, match=r"so they can't make it: call optimizer\.step\(\) in the loop"):
        backward_alone(model, loader)


def trains_with_hooks(member):
    Hooks(member.model)
    for x, y in member.loader:
        member.loss(x, y).backward()
        member.step()


def test_a_step_that_is_torn():
    assert not compare(trains_with_hooks).warnings


def test_draws_are_the_same_on_all_workers_and_leave_no_trace():
    drawn = []
    for rank in range(2):
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.ones(3)
        parameter.register_hook(lambda gradient: gradient + torch.randn(3))
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        ParameterHooks(lambda one=parameter: [one]).call(lambda: 7)
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append(parameter.grad)
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], torch.ones(3))


def test_what_is_removed_while_hooks_rest_is_gone():
    parameter = torch.nn.Parameter(torch.zeros(1))
    handles = [parameter.register_hook(lambda gradient: gradient * 2) for _ in range(3)]
    hooks = ParameterHooks(lambda: [parameter])
    with hooks.aside():
        handles[0].remove()
        parameter.sum().backward()
        assert parameter.grad == 1
    handles[2].remove()
    hooks.call(lambda: 0)
    assert parameter.grad == 2


def test_manual_optimization_calls_them_on_the_sum_of_each_pass():
    batches = torch.randn(14, 12, 3, generator=torch.Generator().manual_seed(1))

    def train(workers):
        board = Board(workers)
        members = [ManualMember(rank, board) for rank in range(workers)]
        for member in members:
            Hooks(torch.nn.ModuleList([member.first, member.second]), after=False)
        return [weights for weights, _ in in_threads(lambda member: member.train(batches), members)]

    (alone,) = train(1)
    for ours in train(2):
        torch.testing.assert_close(ours, alone)
