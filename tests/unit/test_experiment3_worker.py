"""What experiment 3 does within a worker: exact sums of gradients, and waiting for the driver."""

from __future__ import annotations

import threading

import pytest
import torch

from benchmarks.experiments.convergence.plan import go_file, held_file
from benchmarks.experiments.convergence.resnet20 import GRID, LIMIT, TERMS, AddedExactly, Hold


def gradients(exact):
    """Of ``TERMS`` micro-batches."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(30, 20)
    model = AddedExactly(linear) if exact else linear
    found = []
    for _ in range(TERMS):
        model.zero_grad()
        model(torch.randn(8, 30)).square().mean().backward()
        found.append(linear.weight.grad.clone())
    return found


@pytest.mark.parametrize("exact", [True, False])
def test_sums_do_not_depend_on_the_order_if_they_are_exact(exact):
    parts = gradients(exact)
    forward, backward = sum(parts), sum(reversed(parts))
    halves = sum(parts[: TERMS // 2]) + sum(parts[TERMS // 2 :])
    same = torch.equal(forward, backward) and torch.equal(forward, halves)
    assert same is exact
    plain = sum(gradients(False))
    torch.testing.assert_close(forward, plain, rtol=0, atol=TERMS * GRID)


def test_the_largest_gradients_still_add_exactly():
    parts = [torch.tensor(LIMIT - GRID), *[torch.tensor(LIMIT)] * (TERMS - 1)]
    assert sum(parts).item() == sum(reversed(parts)).item() == TERMS * LIMIT - GRID


def test_a_worker_waits_until_it_is_told_to_go(tmp_path):
    hold = Hold(tmp_path, [3], seconds=60)
    hold.on_world_change(2, 0)
    hold.on_train_batch_end(2, {})
    assert not held_file(tmp_path, 2).exists()
    worker = threading.Thread(target=hold.on_train_batch_end, args=(3, {}))
    worker.start()
    worker.join(0.1)
    assert worker.is_alive()
    assert held_file(tmp_path, 3).exists()
    go_file(tmp_path, 3).touch()
    worker.join(60)
    assert not worker.is_alive()
    with pytest.raises(TimeoutError, match=r"held after step 4: no go from the driver within 0\.05 s"):
        Hold(tmp_path, [4], seconds=0.05).on_train_batch_end(4, {})
