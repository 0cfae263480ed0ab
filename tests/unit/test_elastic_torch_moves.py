"""What a forward pass moves, beside the gradients: on any number of workers as on one device."""

import copy

import pytest
import torch
from elastic_kit import Board, Trainee, in_threads, make_data
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_kit import compare, each_batch, run
from refusal_kit import refused, require_refusal
from torch.nn.functional import cross_entropy

from elasticdl.elastic.core.plan import BatchPolicy, epoch_order


class Moving(torch.nn.Module):
    """Moves buffers in each of the ways that people's models do; all of them depend on a batch by means or sums alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(8, 3)
        self.register_buffer("in_place", torch.zeros(8))
        self.register_buffer("assigned", torch.zeros(8))
        self.register_buffer("spectrum", torch.zeros(8, dtype=torch.cfloat))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("has_begun", torch.tensor(False))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                mean = x.mean(0)
                self.in_place.mul_(0.9).add_(0.1 * mean)
                self.assigned = 0.9 * self.assigned + 0.1 * mean
                self.spectrum = self.spectrum + 1j * mean
                self.num_batches_tracked += 1
                self.batches += 1
                self.has_begun.fill_(True)
        return self.net(x)


def everything(model):
    return {name: each.detach().clone() for name, each in (*model.named_buffers(), *model.named_parameters())}


def on_one_device(samples, batch):
    model, data, order = Moving(), make_data(samples), epoch_order(samples, 0, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for start in range(0, samples, batch):
        x, y = data[order[start : start + batch]]
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return everything(model)


def train(kind, samples, batch, micro_batch, workers=2):
    """What each has of the library's loop, after an epoch of it."""
    board, policy = Board(workers), BatchPolicy(batch, None, micro_batch)
    members = [Trainee(rank, board, policy, model=kind(), data=make_data(samples)) for rank in range(workers)]
    in_threads(lambda member: member.train(), members)
    return [everything(member.model) for member in members]


@settings(max_examples=12, deadline=None)
@given(samples=st.integers(3, 40), batch=st.integers(3, 20), micro_batch=st.integers(1, 8), workers=st.integers(1, 4))
@example(samples=9, batch=5, micro_batch=2, workers=3)
@example(samples=49, batch=16, micro_batch=2, workers=3)  # in the last batch two workers have no sample
def test_the_library_moves_buffers_as_one_device_does(samples, batch, micro_batch, workers):
    expected = on_one_device(samples, batch)
    for found in train(Moving, samples, batch, micro_batch, workers):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


STEPS = each_batch("loss().backward()")


@settings(max_examples=12, deadline=None)
@given(samples=st.integers(2, 40), batch=st.integers(2, 20), workers=st.integers(1, 4))
@example(samples=49, batch=16, workers=3)  # the last batch has one sample
def test_a_plain_loop_moves_buffers_as_one_device_does(samples, batch, workers):
    compare(STEPS, workers, make=Moving, samples=samples, batch=batch)


def test_a_step_that_is_made_again_in_pieces_moves_buffers_once():
    """Of the size that the survivor's part had before."""
    compare(STEPS, loses=True, make=Moving)


class Holds(torch.nn.Module):
    """What it does with its input first is told, and what it holds for that."""

    def __init__(self, first, held=None, persistent=True):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.first = torch.nn.Linear(8, 3), first
        self.norm, self.target = torch.nn.BatchNorm1d(8), copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("held", torch.zeros(1) if held is None else held.clone(), persistent)

    def forward(self, x):
        made = self.first(self, x)
        return self.net(x if made is None else made)


def grow(model, x):
    model.held = torch.arange(1.0, len(x) + 1)


def rest(model, x): ...


def count(model, x):
    model.held += 1


def widen(model, x):
    model.held.copy_(torch.maximum(model.held, x.max()))


def follow(model, x):
    """As a target network does."""
    for own, other in zip(model.target.parameters(), model.net.parameters(), strict=True):
        own.data.mul_(0.9).add_(other.data + 1, alpha=0.1)


CHANGES = r"the forward pass changes target\.\w+, which is not trained, .* update the target network after optimizer\.step\(\)"


@pytest.mark.parametrize(
    ("first", "held", "words"),
    [
        (grow, torch.zeros(1), r"held of Holds was float32 of shape \(1,\) .* of shape \(4,\) after it"),
        (rest, torch.ones(3).to(torch.uint16), ""),
        (widen, torch.tensor(-torch.inf), "the buffer held of Holds begins infinite and moves .*disable_observer"),
        (rest, torch.tensor(-torch.inf), ""),
        (follow, None, CHANGES),
    ],
)
def test_what_has_no_mean_is_refused_in_one_line(first, held, words):
    def run():
        train(lambda: Holds(first, held), 8, 8, 8)

    refused(words, run) if words else run()


def test_what_has_no_mean_is_refused_in_a_plain_loop():
    _, (said,) = run(STEPS, 1, make=lambda: Holds(follow))
    require_refusal(said, CHANGES)


def test_a_cache_is_each_workers_own():
    found = train(lambda: Holds(grow, persistent=False), 7, 7, 7)
    assert [len(each["held"]) for each in found] == [4, 3]


@pytest.mark.parametrize(("samples", "batch"), [(11, 8), (9, 3), (20, 5)])
def test_with_batch_norm_the_librarys_loop_makes_no_pass_on_one_sample(samples, batch):
    """Which raises."""
    one, other = train(lambda: Holds(lambda model, x: model.norm(x)), samples, batch, 4)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_what_is_not_in_the_models_state_dict_travels():
    policy = BatchPolicy(8, None, 8)
    member, newcomer = (
        Trainee(0, Board(1), policy, model=Holds(count, torch.zeros(2), False), data=make_data(8)) for _ in "12"
    )
    member.train()
    newcomer.state.load_state_dict(copy.deepcopy(member.state.state_dict()))
    assert newcomer.model.held.tolist() == [1.0, 1.0]
