"""The arithmetic of steps: batch plan, order, progress over arbitrary histories of workers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticdl.elastic.core.plan import (
    BatchPlan,
    BatchPolicy,
    Progress,
    SampleOrder,
    Spread,
    epoch_order,
    equal_shares,
    step_seed,
)

sizes = st.integers(1, 2000)
workers = st.integers(1, 40)
bounds = st.one_of(st.none(), st.integers(1, 300))


def micro_sizes(plan, most, least=1):
    """By rank."""
    return [[each.samples for each in plan.mine(rank, most, least)] for rank in range(len(plan.shares))]


@given(batch=sizes, workers=workers, bound=bounds, least=st.integers(1, 5))
def test_equal_shares_are_exact_balanced_and_within_their_bounds(batch, workers, bound, least):
    plan = micro_sizes(BatchPlan.equal(range(batch), workers, least=least), bound, least)
    shares = [sum(micro) for micro in plan]
    having = shares[: max(1, min(workers, batch // least))]
    assert (len(plan), sum(having)) == (workers, batch)
    assert shares == sorted(shares, reverse=True) == list(equal_shares(batch, workers, least))
    assert max(having) - min(having) <= 1
    for share, micro in zip(shares, plan, strict=True):
        assert not micro or max(micro) - min(micro) <= 1
        assert not micro or min(micro) >= min(least, share)
        assert len(micro) == (share and max(1, min(-(-share // (bound or share)), share // least)))


@st.composite
def plans(draw):
    """With any shares."""
    shares = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)))
    whole = range(100, 100 + sum(shares))
    return BatchPlan(whole, shares, seed=draw(st.integers(0, 9)), step=draw(st.integers(0, 9)))


@given(plan=plans(), bound=st.integers(1, 9), bounded=st.booleans())
def test_runs_are_the_batch_in_rank_order_whatever_the_shares(plan, bound, bounded):
    most = bound if bounded else None
    found = [plan.mine(rank, most) for rank in range(len(plan.shares))]
    every = [each for mine in found for each in mine]
    assert [index for each in every for index in each.indices] == list(plan.whole)
    assert sum(each.weight for each in every) == pytest.approx(1)
    for rank, mine in enumerate(found):
        assert [each.first for each in mine[:1]] == list(plan.run(rank))[:1]
        assert len(mine) == (-(-plan.shares[rank] // bound) if bounded else min(plan.shares[rank], 1))
    for each in every:
        assert each.samples == len(each.indices) <= (most or len(plan.whole))
        assert each.indices[0] == plan.whole[each.first]
        assert each.weight == each.samples / len(plan.whole)


@given(plan=plans())
def test_who_has_no_sample_makes_the_pass_of_another_and_it_counts_for_nothing(plan):
    passes = [plan.whole_run(rank) for rank in range(len(plan.shares))]
    assert [index for each in passes for index in each.indices[: each.samples]] == list(plan.whole)
    assert sum(each.weight for each in passes) == pytest.approx(1)
    first = next(each for each in passes if each.weight)
    for share, each in zip(plan.shares, passes, strict=True):
        assert share or (each.samples, each.weight, each.indices) == (0, 0.0, first.indices)


@given(batch=st.integers(2, 300), workers=workers, bound=st.one_of(st.none(), st.integers(2, 40)))
def test_no_micro_batch_has_one_sample_where_two_are_needed(batch, workers, bound):
    """Unless two is the most, and the batch is odd: then one worker has one over."""
    found = micro_sizes(BatchPlan.equal(range(batch), workers, least=2, most=bound), bound)
    every = [size for mine in found for size in mine]
    assert sum(every) == batch
    assert all(size <= (bound or batch) for size in every)
    assert every.count(1) == (batch % 2 if bound == 2 else 0)


@given(batch=st.integers(1, 300), workers=st.integers(1, 6), together=st.integers(1, 4), bound=bounds)
def test_the_processes_of_a_worker_have_equally_many_micro_batches_and_each_sample_counts_once(
    batch, workers, together, bound
):
    plan = BatchPlan.equal(range(batch), workers * together)
    found = [plan.alike(place, together, bound) for place in range(workers * together)]
    every = [each for mine in found for each in mine]
    assert [index for each in every for index in each.indices[: each.samples]] == list(range(batch))
    assert sum(each.weight for each in every) == pytest.approx(1)
    assert all(0 < len(each.indices) <= (bound or batch) for each in every), "each has something to run"
    for first in range(0, len(found), together):
        counts = {len(mine) for mine in found[first : first + together]}
        assert counts == {max(-(-plan.shares[first] // (bound or batch)), 1)}, "and no more than are needed"


def test_order_is_a_pure_function_and_differs_between_epochs_and_seeds():
    """A checkpoint must continue with the same order and the same numbers in a later version."""
    assert epoch_order(8, seed=7, epoch=3).tolist() == [4, 3, 5, 6, 0, 7, 1, 2]
    assert [step_seed(0, 0, 0), step_seed(7, 3, 0), step_seed(7, 3, 128)] == [3442837909, 2071489831, 1825764898]
    first = epoch_order(100, seed=1, epoch=0)
    assert (first != epoch_order(100, seed=1, epoch=1)).any()
    assert (first != epoch_order(100, seed=2, epoch=0)).any()
    assert sorted(first) == list(range(100))
    assert (epoch_order(5, 1, 3, shuffle=False) == np.arange(5)).all()


@st.composite
def histories(draw):
    """Worlds in a row: how many workers, how many of their steps are committed, and whether one more is torn."""
    return draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4), st.booleans()), max_size=8))


def walked(order, progress, workers, most):
    """The samples of some steps, in order, and the progress after them."""
    used = []
    plans = [list(order.steps(progress, rank, workers))[:most] for rank in range(workers)]
    for step in zip(*plans, strict=True):
        used += [index for plan in step for micro in plan.micro_batches for index in micro.indices.tolist()]
        progress = step[0].after
    return used, progress


@given(
    samples=st.integers(1, 120),
    policy=st.builds(BatchPolicy, st.integers(1, 30), st.none(), bounds),
    workers=st.integers(1, 4),
    parts=st.integers(1, 4),
)
def test_the_parts_of_all_workers_make_the_same_steps_of_an_epoch(samples, policy, workers, parts):
    order = SampleOrder(samples, policy, seed=3)
    places = [(rank, workers, Spread(parts, part)) for rank in range(workers) for part in range(parts)]
    used, progress = [], Progress()
    for step in zip(*(order.steps(progress, *place) for place in places), strict=True):
        assert len({(each.step, each.after, each.batch, each.checksum) for each in step}) == 1
        every = [micro for each in step for micro in each.micro_batches]
        counted = [index for micro in every for index in micro.indices[: micro.samples]]
        assert counted == list(step[0].whole)
        used += counted
        for rank in range(workers):
            assert len({len(each.micro_batches) for each in step[rank * parts : (rank + 1) * parts]}) == 1
    assert used == epoch_order(samples, 3, 0).tolist()


@given(
    samples=st.integers(1, 120),
    batch=st.integers(1, 30),
    steps=st.integers(0, 12),
    epoch=st.integers(0, 12),
    position=st.integers(0, 40),
    drop_last=st.booleans(),
)
def test_the_steps_of_all_epochs_are_those_of_each(samples, batch, steps, epoch, position, drop_last):
    policy = BatchPolicy(batch, None, 4)
    order = SampleOrder(samples, policy, drop_last=drop_last, steps_per_epoch=steps)
    progress = Progress(step=100, epoch=epoch, position=position)
    for epochs in (epoch, epoch + 1, epoch + 2, epoch + 17):
        later = [order.remaining_steps(Progress(epoch=each), 2) for each in range(epoch + 1, epochs)]
        assert order.total_steps(progress, epochs, 2) == 100 + order.remaining_steps(progress, 2) + sum(later)
    assert order.total_steps(progress, 10**12, 2) >= order.total_steps(progress, 10**9, 2)  # in no time


@given(samples=st.integers(1, 120), batch=st.integers(1, 30), steps=st.integers(1, 12), history=histories())
def test_epochs_of_some_steps_go_through_all_samples_before_they_are_shuffled_anew(samples, batch, steps, history):
    """As Keras's ``fit(steps_per_epoch=)``: a pass is cut into epochs, the last of which may be shorter."""
    order = SampleOrder(samples, BatchPolicy(batch, None, 4), seed=3, steps_per_epoch=steps)
    in_pass = -(-samples // (steps * batch))
    progress, changes = Progress(), iter([*history, *[(3, 10**6, False)] * 2 * in_pass])
    for number in range(2):
        used = []
        while progress.epoch < (number + 1) * in_pass:
            workers, committed, _ = next(changes)
            left = order.remaining_steps(progress, workers)
            assert left == len(list(order.steps(progress, 0, workers))) <= steps
            made, progress = walked(order, progress, workers, committed)
            used += made
            if not order.remaining_steps(progress, 1):
                progress = progress.next_epoch()
        assert used == epoch_order(samples, 3, number).tolist()
