"""The gradients of manual optimization, summed after each backward pass: those that one device would have."""

from types import SimpleNamespace

import pytest
import torch
from elastic_kit import Board, SumOfThreads, in_threads
from refusal_kit import refused

pytest.importorskip("lightning.pytorch")

from lightning.pytorch.loops.optimization.manual import _ManualOptimization

from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.lightning.manual import Gradients, Manual
from elasticdl.elastic.torch_kit import reducer as buckets


class Member:
    """A worker on a board, with two layers of which each has an optimizer."""

    def __init__(self, rank, board):
        self.rank, self.size = rank, board.size
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        self.optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.first, self.second)]
        loops = SimpleNamespace(epoch_loop=SimpleNamespace())
        trainer = SimpleNamespace(optimizers=self.optimizers, fit_loop=loops)
        loops.epoch_loop.manual_optimization = self.loop = _ManualOptimization(trainer)
        self.said, self.warnings = [], []
        collective = SumOfThreads(rank, board)
        job = SimpleNamespace(
            size=board.size,
            under_master=True,
            collective=collective,
            advance=self.said.append,
            warn=self.warnings.append,
        )
        self.manual = Manual(trainer, job)
        self.parameters = [*self.first.parameters(), *self.second.parameters()]

    def backward(self, batch):
        mine = batch.chunk(self.size)[self.rank]
        loss = self.second(self.first(mine)).pow(2).mean()
        self.manual.sum(lambda: (loss / self.size).backward())

    def of_the_first(self):
        self.first(torch.ones(1, 3)).sum().backward()

    def train(self, batches, train_second=(True,)):
        for number, batch in enumerate(batches):
            self.second.requires_grad_(train_second[number % len(train_second)])
            self.backward(batch)
            if number % 3 == 2:
                self.optimizers[0].step()
                self.optimizers[0].zero_grad()
            if number % 4 == 3:
                self.optimizers[1].step()
                self.optimizers[1].zero_grad()
        return [each.detach().clone() for each in self.parameters], [each.grad for each in self.parameters]


def of_workers(workers, work):
    board = Board(workers)
    return in_threads(work, [Member(rank, board) for rank in range(workers)])


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("train_second", [(True,), (True, False), (False, True, True)])
def test_any_number_of_workers_makes_the_updates_of_one(workers, train_second):
    batches = torch.randn(14, 12, 3, generator=torch.Generator().manual_seed(1))
    (alone,), members = (
        of_workers(count, lambda member: member.train(batches, train_second)) for count in (1, workers)
    )
    for ours in members:
        torch.testing.assert_close(ours, alone)  # None where one device has no gradient


def test_what_follows_a_sum_is_no_waiting_and_once_training_is_over_parameters_have_no_hooks(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)  # of all but the last one sums may begin within a pass

    def work(member):
        member.backward(torch.ones(2, 3))
        member.manual.close()
        return member.said, [bool(each._post_accumulate_grad_hooks) for each in member.parameters]

    assert of_workers(2, work) == [([Activity.WAIT, Activity.COMPUTE], [False] * 4)] * 2


def test_a_parameter_that_no_worker_has_a_gradient_of_has_none():
    def work(member):
        member.manual.sum(member.of_the_first)
        return [each.grad is None for each in member.parameters]

    assert of_workers(2, work) == [[False, False, True, True]] * 2


def test_a_sum_that_fails_ends_the_training_step_whatever_it_catches():
    board = Board(2)
    member = Member(0, board)
    board.fail = True

    def training_step():
        member.loop.optim_step_progress.increment_ready()
        member.second.requires_grad_(False)
        try:
            member.backward(torch.ones(4, 3))
        except Exception:  # noqa: BLE001
            return "caught"

    member.manual.begin_step()
    with pytest.raises(WorldBroken):
        member.manual.run(training_step)
    member.manual.begin_again()
    assert member.loop.optim_step_progress.total.ready == 0
    assert member.second.weight.requires_grad


def test_gradients_between_two_steps_travel():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad = torch.ones(2)
    sent = Gradients(lambda: parameters).dump()
    parameters[0].grad, parameters[1].grad = None, torch.ones(2)
    Gradients(lambda: parameters).load(sent)
    assert parameters[0].grad.tolist() == [1.0, 1.0]
    assert parameters[1].grad is None


def test_an_update_by_a_workers_own_gradients_is_refused_at_once():
    member = Member(0, Board(1))

    def train(backward):
        backward()
        member.loop.optim_step_progress.increment_ready()

    member.manual.begin_step()
    member.manual.run(member.of_the_first)  # which is no update
    refused(r"call self\.manual_backward\(loss\)", lambda: member.manual.run(lambda: train(member.of_the_first)))
    member.manual.begin_step()
    member.manual.run(lambda: train(lambda: member.backward(torch.ones(2, 3))))
    member.manual.begin_step()
    member.manual.run(lambda: train(member.of_the_first))  # gradients of earlier passes may be summed already
