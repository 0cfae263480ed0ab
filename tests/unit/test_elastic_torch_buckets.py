"""Gradients that are reduced in several buckets, while the backward pass goes on; which of them there are may change."""

import pytest
import torch
from elastic_kit import Board, SumOfThreads, Trainee, in_threads
from refusal_kit import refused
from torch.nn.functional import cross_entropy

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.torch_kit.reduction.buckets import Buckets

POLICY = BatchPolicy(16, None, 4)


def trainees(workers, kind=Trainee):
    board = Board(workers)
    return [kind(rank, board, POLICY) for rank in range(workers)]


def test_a_sparse_gradient_becomes_a_dense_one():
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    Buckets([table.weight], [], SumOfThreads(0, Board(1))).finish(1.0)
    assert table.weight.grad.tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 1, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 5).T,
        torch.randn(3, 5)[:, ::2],  # with gaps: torch makes a contiguous gradient
        torch.randn(3, 5),
    ],
)
def test_a_gradient_lies_in_memory_as_torch_has_made_it(weight, fused):
    """A fused optimizer takes the elements of both one after the other, as they lie there."""
    alone, summed = (torch.nn.Parameter(weight.detach().clone(memory_format=torch.preserve_format)) for _ in range(2))
    factor = torch.randn(weight.shape)
    for each in (alone, summed):
        (each * factor).sum().backward()
    Buckets([summed], [], SumOfThreads(0, Board(1))).finish(1.0)
    assert summed.grad.stride() == alone.grad.stride()
    for each in (alone, summed):
        torch.optim.SGD([each], lr=0.5, fused=fused and each is summed).step()
    torch.testing.assert_close(summed, alone)


def test_gradients_are_those_of_the_global_batch_before_the_step():
    def gradients(member):
        for inputs, labels in (batch := next(iter(member.loader))):
            batch.backward(cross_entropy(member.model(inputs), labels))
        norm = torch.nn.utils.clip_grad_norm_(member.model.parameters(), 1.0)
        member.optimizer.step()
        return norm

    one, other = in_threads(gradients, trainees(2))
    (alone,) = in_threads(gradients, trainees(1))
    assert one == other
    torch.testing.assert_close(one, alone)


class Freezing(Trainee):
    """Trains the last layer alone, then all, then the first alone, which was never given to the optimizer at first."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.schedule = {0: (False, True), 2: (True, True), 4: (True, False)}

    def make_step(self, batch):
        for layer, trained in zip(
            (self.model[0], self.model[-1]), self.schedule.get(self.state.step, ()), strict=False
        ):
            layer.requires_grad_(trained)
        super().make_step(batch)


def test_parameters_may_be_frozen_and_unfrozen():
    (alone,) = trainees(1, Freezing)
    alone.train(2)
    members = trainees(3, Freezing)
    in_threads(lambda member: member.train(2), members)
    for member in members:
        torch.testing.assert_close(member.losses, alone.losses, rtol=2e-5, atol=1e-6)
        for mine, theirs in zip(member.model.parameters(), members[0].model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def freeze(member):
    member.model[0].requires_grad_(False)


def transpose(member):
    weight = member.model[0].weight
    weight.data = weight.data.T.contiguous().T


@pytest.mark.parametrize(("plant", "step"), [(freeze, 0), (freeze, 1), (transpose, 0)])
def test_workers_that_train_different_parameters_are_told(plant, step):
    """Or one in another memory format."""

    def train(member):
        for batch in member.loader:
            if (member.context.rank, member.state.step) == (1, step):
                plant(member)
            member.make_step(batch)
            member.state.commit()

    def told(member):
        refused(r"train different parameters, of which this one has \d: freeze", lambda: train(member))
        return member.state.step

    assert in_threads(told, trainees(2)) == [step] * 2
