"""What a forward pass moves, beside the gradients: on any number of workers as on one device."""

import copy

import pytest
import torch
from elastic_kit import Board, PlainScript, SumOfThreads, in_threads
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusal_kit import refused
from session_kit import FakeMaster, enter
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.elastic.core.plan import BatchPolicy, epoch_order
from elasticdl.elastic.torch.torn_step import Tape
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_state import TorchState


class Moving(torch.nn.Module):
    """Moves buffers in each of the ways that people's models do; all of them depend on a batch by means or sums alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.register_buffer("in_place", torch.zeros(3))
        self.register_buffer("assigned", torch.zeros(3))
        self.register_buffer("spectrum", torch.zeros(3, dtype=torch.cfloat))
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


def make_data(samples):
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1)) + 0.5
    return TensorDataset(x, x.sum(1, keepdim=True))


def make_optimizer(model):
    return torch.optim.SGD(model.net.parameters(), lr=0.05)


def everything(model):
    return {name: each.detach().clone() for name, each in (*model.named_buffers(), *model.named_parameters())}


def on_one_device(samples, batch, order):
    model, data = Moving(), make_data(samples)
    optimizer = make_optimizer(model)
    for start in range(0, samples, batch):
        x, y = data[order[start : start + batch]]
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    return everything(model)


class Library:
    def __init__(self, rank, board, samples, batch, micro_batch, kind=Moving):
        collective = SumOfThreads(rank, board)
        context = ElasticContext(FakeMaster().session, collective, BatchPolicy(batch, None, micro_batch), seed=0)
        self.model = kind()
        self.optimizer = make_optimizer(self.model)
        self.loader = ElasticDataLoader(context, make_data(samples))
        self.state = TorchState(context, self.model, self.optimizer, self.loader, {})
        enter(context, collective.world)

    def train(self):
        for batch in self.loader:
            for x, y in batch:
                batch.backward(mse_loss(self.model(x), y))
            self.optimizer.step()
            self.state.commit()
        return everything(self.model)


class Plain(PlainScript):
    def __init__(self, rank, board, samples, batch, _, kind=Moving):
        model = kind()
        loader = DataLoader(make_data(samples), batch_size=batch)
        super().__init__(rank, board, model, make_optimizer(model), loader)

    def train(self):
        for x, y in self.loader:
            self.optimizer.zero_grad()
            mse_loss(self.model(x), y).backward()
            self.optimizer.step()
        return everything(self.model)


def compare(kind, samples, batch, micro_batch, workers, order):
    board = Board(workers)
    members = [kind(rank, board, samples, batch, micro_batch) for rank in range(workers)]
    expected = on_one_device(samples, batch, order)
    for found in in_threads(lambda member: member.train(), members):
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )


@settings(max_examples=12, deadline=None)
@given(samples=st.integers(3, 40), batch=st.integers(3, 20), micro_batch=st.integers(1, 8), workers=st.integers(1, 4))
@example(samples=9, batch=5, micro_batch=2, workers=3)
@example(samples=49, batch=16, micro_batch=2, workers=3)  # in the last batch two workers have no sample
def test_the_library_moves_buffers_as_one_device_does(samples, batch, micro_batch, workers):
    compare(Library, samples, batch, micro_batch, workers, epoch_order(samples, 0, 0))


@settings(max_examples=12, deadline=None)
@given(samples=st.integers(2, 40), batch=st.integers(2, 20), workers=st.integers(1, 4))
@example(samples=49, batch=16, workers=3)  # the last batch has one sample
def test_a_plain_loop_moves_buffers_as_one_device_does(samples, batch, workers):
    compare(Plain, samples, batch, None, workers, range(samples))


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        return self.net(self.norm(x))


@pytest.mark.parametrize("kind", [Moving, Norm])
def test_a_step_that_is_made_again_in_pieces_moves_buffers_once(kind):
    model, data = kind(), make_data(8)
    script = PlainScript(0, Board(1), model, make_optimizer(model), DataLoader(data, batch_size=8))
    for x, y in script.loader:
        mse_loss(model(x), y).backward()
        participant = script.host.participant
        (given,) = participant.open_batches
        participant.state.reducer.reset_buffers()
        participant.state.begin_step()
        participant.state.reducer.drop_gradients()
        given.tape = Tape([x, y])  # a worker that is alone has noted nothing
        given.tape.note_model(model, (x,), {}, out := model(x))
        loss = given.tape.call(mse_loss, (out, y), {})
        given.tape.note_backward(loss, {})
        participant.state.reducer.reset_buffers()
        given.most = 3  # samples of its part, as it was in a world of three
        with script.host._watch.paused():  # as in its step
            participant.remake()
        script.optimizer.step()
    expected = kind()
    expected(data[:][0])
    for name, value in expected.named_buffers():
        if name != "norm.running_var":  # of each piece by itself, as with micro-batches
            torch.testing.assert_close(model.get_buffer(name), value, msg=lambda text, n=name: f"{n}: {text}")


class Holds(torch.nn.Module):
    """Holds a buffer, and does with it what it is told."""

    def __init__(self, buffer, move, persistent=True):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.register_buffer("held", buffer.clone(), persistent)
        self.move = move

    def forward(self, x):
        self.move(self, x)
        return self.net(x)


def grow(model, x):
    model.held = torch.arange(1.0, len(x) + 1)


def rest(model, x): ...


def count(model, x):
    model.held += 1


def widen(model, x):
    model.held.copy_(torch.maximum(model.held, x.max()))


@pytest.mark.parametrize(
    ("buffer", "move", "words"),
    [
        (torch.zeros(1), grow, r"held of Holds was float32 of shape \(1,\) .* of shape \(4,\) after it"),
        (torch.ones(3).to(torch.uint16), rest, ""),
        (
            torch.tensor(-torch.inf),
            widen,
            "the buffer held of Holds begins infinite and moves .* model.apply.torch.ao.quantization.disable_observer",
        ),
        (torch.tensor(-torch.inf), rest, ""),
    ],
)
def test_a_buffer_of_which_there_is_no_mean_is_refused_in_one_line(buffer, move, words):
    board = Board(2)
    members = [Library(rank, board, 8, 8, 8, kind=lambda: Holds(buffer, move)) for rank in range(2)]

    in_threads(lambda member: refused(words, member.train) if words else member.train(), members)


def test_a_cache_is_each_workers_own():
    board = Board(2)
    members = [Library(rank, board, 7, 7, 7, kind=lambda: Holds(torch.zeros(1), grow, False)) for rank in range(2)]
    in_threads(lambda member: member.train(), members)
    assert [len(member.model.held) for member in members] == [4, 3]


@pytest.mark.parametrize(("samples", "batch"), [(11, 8), (9, 3), (20, 5)])
def test_with_batch_norm_the_librarys_loop_makes_no_pass_on_one_sample(samples, batch):
    """Which raises."""
    board = Board(2)
    members = [Library(rank, board, samples, batch, 4, kind=Norm) for rank in range(2)]
    one, other = in_threads(lambda member: member.train(), members)
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_one_worker_with_other_buffers_is_told():
    board = Board(2)
    members = [Library(rank, board, 32, 8, 8, kind=Norm) for rank in range(2)]
    members[1].model.register_buffer("more", torch.zeros(2))
    in_threads(lambda member: refused("the models of the workers have different buffers", member.train), members)


class Target(torch.nn.Module):
    """Its target network is the other in the beginning, and follows it in the forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1)
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def follow(self):
        for own, other in zip(self.target.parameters(), self.net.parameters(), strict=True):
            own.data.mul_(0.9).add_(other.data, alpha=0.1)

    def forward(self, x):
        self.follow()
        return self.net(x)


class FollowsBehind(Target):
    def forward(self, x):
        return self.net(x)


def test_a_target_network_may_follow_behind_each_batch():
    script = Plain(0, Board(1), 64, 8, None, FollowsBehind)
    for number, (x, y) in enumerate(script.loader):
        mse_loss(script.model(x), y).backward()
        if number % 2:
            script.optimizer.step()
            script.optimizer.zero_grad()
        script.model.follow()
    assert not torch.equal(script.model.target.weight, Target().target.weight)


@pytest.mark.parametrize("kind", [Library, Plain])
def test_a_frozen_parameter_that_a_forward_pass_changes_is_refused_in_one_line(kind):
    member = kind(0, Board(1), 32, 8, None, Target)
    words = r"the forward pass changes target\.\w+, which is not trained, .* update the target network after optimizer\.step\(\)"
    refused(words, member.train)


def test_what_is_not_in_the_models_state_dict_travels():
    member, newcomer = (Library(0, Board(1), 8, 8, 8, kind=lambda: Holds(torch.zeros(2), count, False)) for _ in "12")
    member.train()
    newcomer.state.load_state_dict(copy.deepcopy(member.state.state_dict()))
    assert newcomer.model.held.tolist() == [1.0, 1.0]
