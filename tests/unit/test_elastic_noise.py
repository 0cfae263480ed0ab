"""How much the gradients of single samples differ: measured now and then, where the batch follows the workers."""

from __future__ import annotations

import pytest
import torch
from elastic_kit import Board, SumOfThreads, in_threads, train_together
from session_kit import FakeMaster, enter

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.vote import NOISE_STEPS, GradientNoise
from elasticdl.elastic.torch_kit.data.loaders import ElasticDataLoader
from elasticdl.elastic.torch_kit.pieces.torch_state import TorchState
from elasticdl.elastic.torch_kit.reduction import buckets
from elasticdl.elastic.torch_kit.torch_job import ElasticContext

SPREAD, DIMENSIONS, SAMPLES = 3.0, 20, 4000


class Centre(torch.nn.Module):
    """The loss of a sample x is |w - x|^2 / 2, so its gradient is w - x, and the noise is that of the samples."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = (torch.nn.Parameter(torch.zeros(n)) for n in (5, DIMENSIONS - 5))

    def forward(self, x):
        return (torch.cat([self.first, self.rest]) - x).square().sum(1).mean() / 2


def train(workers, policy, unfrozen_at=0):
    """What rank 0 reports of a training that never moves."""
    board = Board(workers)
    samples = 0.5 + SPREAD * torch.randn(SAMPLES, DIMENSIONS, generator=torch.Generator().manual_seed(7))

    def work(rank):
        master, model = FakeMaster(), Centre()
        context = ElasticContext(master.session, SumOfThreads(rank, board), policy, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = ElasticDataLoader(context, torch.utils.data.TensorDataset(samples))
        state = TorchState(context, model, optimizer, loader, {})
        enter(context, context.collective.world)
        for _ in loader.sampler.epochs(1):
            for number, batch in enumerate(loader):
                model.first.requires_grad_(number >= unfrozen_at)
                for (inputs,) in batch:
                    batch.backward(model(inputs))
                optimizer.step()
                state.commit()
        return master.reports

    return in_threads(work, range(workers))[0], samples


@pytest.mark.parametrize(("workers", "micro_batch"), [(2, None), (3, 3)])
def test_the_noise_of_a_quadratic_problem_is_what_it_is_known_to_be(workers, micro_batch, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)  # several, so that sums would begin within the backward pass
    reports, samples = train(workers, BatchPolicy(None, 8, micro_batch))
    told = [each for each in reports if each.gradient_variance]
    assert [each.step for each in told] == [each.step for each in reports[::NOISE_STEPS] if each.samples == 8 * workers]
    variance = sum(each.gradient_variance for each in told) / len(told)
    square = sum(each.gradient_square for each in told) / len(told)
    assert variance == pytest.approx(float(samples.var(0).sum()), rel=0.15)
    assert square == pytest.approx(float(samples.mean(0).square().sum()), rel=0.35)


@pytest.mark.parametrize(("workers", "policy"), [(1, BatchPolicy(None, 8, None)), (2, BatchPolicy(16, None, None))])
def test_it_is_not_measured_where_it_tells_nothing(workers, policy):
    reports, _ = train(workers, policy)
    assert all(each.gradient_variance == each.gradient_square == 0.0 for each in reports)


def test_a_step_that_begins_to_train_further_parameters_tells_nothing():
    """Each worker's own gradients were those of the parameters before, and the sum is that of all."""
    reports, _ = train(2, BatchPolicy(None, 8, None), unfrozen_at=2 * NOISE_STEPS)
    measured = reports[::NOISE_STEPS]
    assert [bool(each.gradient_variance) for each in measured[:4]] == [True, True, False, True]


def test_steps_in_which_it_is_measured_train_as_all_others(monkeypatch):
    """The gradients are the same, summed at the end of the step or meanwhile."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    losses = []
    for steps in (NOISE_STEPS, 1, 10**9):
        monkeypatch.setattr("elasticdl.elastic.torch_kit.pieces.torch_state.NOISE_STEPS", steps)
        losses.append(train_together(2, BatchPolicy(None, 4, None))[0].losses)
    assert losses[0] == losses[1] == losses[2]


def test_what_is_no_number_is_not_told():
    assert GradientNoise.of(float("inf"), 1.0, 16, 2) == GradientNoise()
    assert GradientNoise.of(20.0, 1.0, 10, 2) == GradientNoise(variance=10.0, square=0.0)
