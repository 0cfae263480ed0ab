"""The steps of a reducer on several workers: gradients that come late, parameters without one, and numbers that ride along."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from elastic_kit import Board, SumOfThreads, in_threads
from refusal_kit import refused

from elasticdl.elastic.collectives.port import Inside
from elasticdl.elastic.core.plan import WHOLE, Spread
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.torch_kit import reducer as buckets
from elasticdl.elastic.torch_kit.reducer import ROOM, GradientReducer


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    """A bucket for each parameter."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)


class CountingSums(SumOfThreads):
    begun, is_broken = 0, False

    def begin_sum(self, tensor, name):
        if self.is_broken:
            raise WorldBroken("a worker is lost")
        self.begun += 1
        return super().begin_sum(tensor, name)


class ReducingWorker:
    """Four numbers, each a parameter in a bucket of its own; a backward pass adds what it is told to their gradients."""

    def __init__(self, rank, board):
        self.rank = rank
        self.collective = CountingSums(rank, board)
        self.parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(4)]
        self.reducer = GradientReducer(lambda: self.parameters, [], self.collective)
        self.early = []  # sums that had begun before each step was closed

    def open(self):
        self.reducer.open()
        self.reducer.drop_gradients()
        self.begun = self.collective.begun

    def backward(self, *gradients, last=None):
        terms = [each * g for each, g in zip(self.parameters, gradients, strict=True) if g is not None]
        self.reducer.backward(sum(terms).backward, last=last)

    def close(self, **votes):
        self.early.append(self.collective.begun - self.begun)
        return self.reducer.close(**votes)

    def step(self, *passes, last=None):
        self.open()
        for gradients in passes:
            self.backward(*gradients, last=last)
        return self.close()

    @property
    def gradients(self):
        return [None if each.grad is None else each.grad.item() for each in self.parameters]


ONES = (1.0, 1.0, 1.0, 1.0)


def together(work, workers=2):
    board = Board(workers)
    return in_threads(work, [ReducingWorker(rank, board) for rank in range(workers)])


@pytest.mark.parametrize(("workers", "late_on"), [(2, {0}), (3, {0, 1})])
def test_gradients_that_come_after_their_sum_has_begun_are_added(workers, late_on):
    def work(worker):
        worker.step(ONES)
        found = []
        for number in range(2):
            worker.open()
            worker.backward(*ONES, last=True)
            if worker.rank in late_on and number == 0:
                worker.backward(10.0, None, 100.0, 1000.0, last=False)
            worker.close()
            found.append(worker.gradients)
        return found, worker.early

    late = len(late_on)
    for (first, second), early in together(work, workers):
        whole = workers + late * torch.tensor([10.0, 0.0, 100.0, 1000.0])
        assert first == whole.tolist()
        assert second == [workers] * 4
        assert early == [0, 3, 0]  # the first step agrees on the parameters; the last bucket waits for what rides


def test_a_world_that_breaks_within_a_pass_is_told_once_that_is_over_and_the_next_one_is_not():
    def work(worker):
        worker.step(ONES)
        worker.collective.is_broken = True
        worker.open()
        worker.backward(*ONES, last=True)
        with pytest.raises(WorldBroken):
            worker.close()
        worker.collective.is_broken = False
        worker.step(ONES)
        return worker.gradients

    assert together(work) == [[2.0] * 4] * 2


@pytest.mark.parametrize("last", [True, False, None])
def test_who_has_a_gradient_is_known_though_sums_begin_within_the_pass(last):
    def work(worker):
        for _ in range(3):
            gradients = (1.0, None, 3.0, None) if worker.rank == 0 else (1.0, 2.0, None, None)
            worker.step(gradients, last=last)
        return worker.gradients

    assert together(work) == [[2.0, 2.0, 3.0, None]] * 2


def test_the_last_pass_is_expected_where_the_last_two_steps_were_alike():
    passes = [2, 2, 2, 3, 2, 2, 2, 1, 2]

    def work(worker):
        found = []
        for number in passes:
            worker.step(*[ONES] * number)
            found.append(worker.gradients[0])
        return found, worker.early

    for found, early in together(work):
        assert found == [2.0 * number for number in passes]
        assert early == [0, 0, 3, 3, 0, 0, 0, 0, 0]  # what has come late once may come late again


def test_who_comes_later_expects_what_the_others_expect():
    def work(worker):
        for _ in range(3):
            worker.step(ONES)
        worker.collective.world = replace(worker.collective.world, version=2)
        if worker.rank == 1:
            worker.reducer, worker.early = GradientReducer(lambda: worker.parameters, [], worker.collective), []
        for _ in range(3):
            worker.step(ONES)
        return worker.early[-3:]

    assert together(work) == [[0, 0, 3]] * 2


def test_the_order_of_sums_is_the_same_where_one_worker_begins_them_within_the_pass():
    def work(worker):
        worker.step(ONES)
        worker.step(ONES, last=worker.rank == 0)
        return worker.gradients, worker.early[-1]

    assert together(work) == [([2.0] * 4, 3), ([2.0] * 4, 0)]


def test_what_a_script_clears_behind_its_last_pass_is_refused():
    def work(worker):
        worker.step(ONES)
        worker.open()
        worker.backward(*ONES, last=False)
        clear = partial(worker.reducer.require_not_begun, worker.parameters)
        clear()
        worker.backward(*ONES, last=True)
        refused("^gradients were cleared behind the last backward pass of a step", clear)

    together(work)


def ridden(worker, **numbers):
    worker.open()
    for name, number in numbers.items():
        worker.reducer.ride(name, number)
    worker.backward(*ONES, last=True)
    return worker.close().rides


def test_numbers_ride_along_and_come_back_summed():
    value = 1 + 2.0**-40  # which float32 does not hold

    def work(worker):
        table = [[float("-inf"), 0.0], [1.0, 2.0]] if worker.rank else np.zeros((2, 2))
        found = ridden(worker, loss=value * (worker.rank + 1), table=table)
        return found["loss"].item(), found["table"].tolist()

    assert together(work) == [(3 * value, [[float("-inf"), 0.0], [1.0, 2.0]])] * 2
    assert together(work, workers=1) == [(value, [[0.0, 0.0], [0.0, 0.0]])]


def test_more_numbers_than_there_is_room_for_arrive_too():
    many = np.arange(2.0 * ROOM)

    def work(worker):
        found = [(ridden(worker, many=many)["many"] == 2 * many).all() for _ in range(3)]
        return found, worker.gradients

    assert together(work) == [([True] * 3, [2.0] * 4)] * 2


@pytest.mark.parametrize("others", [{"loss": [1.0, 2.0]}, {}])
def test_workers_that_tell_different_numbers_are_told(others):
    def work(worker):
        rides = ridden(worker, **(others if worker.rank else {"loss": [1.0]}))
        refused("the workers tell each other different numbers", lambda: rides["loss"])
        return rides.are_alike, worker.gradients

    assert together(work) == [(False, [2.0] * 4)] * 2


# ---- workers of several processes ----


class InsideOfThreads(Inside):
    def __init__(self, rank, board):
        self.rank, self.size, self._board = rank, board.size, board

    def sum(self, numbers):
        return [sum(each) for each in zip(*self._board.exchange(self.rank, list(numbers)), strict=True)]

    def sum_(self, tensor):
        tensor.copy_(sum(self._board.exchange(self.rank, tensor.clone())))


class ReducingProcess(ReducingWorker):
    """``equals``: where it meets the processes of its number in the other workers; ``inside``: those of its own."""

    def __init__(self, rank, equals, number, inside, spread):
        super().__init__(rank, equals)
        self.number, self.module = number, torch.nn.Module()
        self.module.register_buffer("moves", torch.zeros(1))
        self.collective.inside = InsideOfThreads(number, inside)
        self.reducer = GradientReducer(lambda: self.parameters, [self.module], self.collective, spread=spread)


def processes(work, workers=1, spread=lambda number: WHOLE):
    """Two of each worker; what they return, by worker and then by process."""
    equals, insides = [Board(workers) for _ in range(2)], [Board(2) for _ in range(workers)]
    every = [(rank, number) for rank in range(workers) for number in range(2)]
    found = [ReducingProcess(rank, equals[number], number, insides[rank], spread(number)) for rank, number in every]
    return in_threads(work, found)


def counted(process):
    """Process 0 has 3 of 4 samples, and 1 has the last, unless it has those of 0."""
    process.open()
    samples, loss = ((3, 2.0), (1, 4.0))[process.number]
    process.module.moves += process.number + 1
    process.reducer.add(loss, samples, weight=samples / 4, is_first=process.number == 0)
    process.reducer.ride("count", samples)
    process.backward(*ONES, last=True)
    sums = process.close(leaving=process.number == 1, batch=process.number)
    vote = sums.vote
    return (
        vote.samples,
        vote.loss,
        sums.rides["count"].item(),
        process.module.moves.item(),
        vote.leaving,
        vote.one_batch,
    )


def test_the_processes_of_the_only_worker_count_together_and_one_speaks_for_all():
    assert processes(counted) == [(4, 2.5, 4.0, 1.25, True, False)] * 2


def test_of_processes_that_have_the_same_samples_one_counts_them():
    found = processes(counted, spread=lambda number: Spread(counts=number == 0))
    assert found == [(3, 2.0, 3.0, 0.75, True, False)] * 2


@pytest.mark.parametrize(("differing", "one_state"), [((), True), ((1, 1), False), ((0, 0), False)])
def test_states_are_compared_with_those_of_the_same_process_in_other_workers(differing, one_state):
    def work(process):
        process.open()
        process.backward(*ONES)
        state = 1000 * process.number + ((process.rank, process.number) == differing)
        return process.close(batch=7, state=state).vote.one_state

    assert processes(work, workers=2) == [one_state] * 4
    assert processes(work) == [True] * 2, "one worker has nothing to be compared with"


def test_workers_of_several_processes_expect_passes_and_end_as_those_of_one():
    def work(process):
        for _ in range(3):
            process.step(ONES)
        return process.gradients, process.early, process.reducer.end().ended

    assert processes(work, workers=2) == [([2.0] * 4, [0, 0, 3], 2)] * 4
