"""The PyTorch twin in a world of one, and with a stand-in for the sums of several workers; gradients in several buckets."""

import copy
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from elastic_kit import Board, SumOfThreads, Trainee, in_threads, make_data, make_model, on_one_device
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loop_benches import compare, each_batch, run
from refusal_kit import refused, require_refusal
from session_kit import lose_world
from torch.nn.functional import cross_entropy

from elasticdl.elastic.collectives.transfer import with_tensors, without_tensors
from elasticdl.elastic.core.plan import BatchPolicy, epoch_order
from elasticdl.elastic.torch_kit import reducer as buckets
from elasticdl.elastic.torch_kit.reducer import Buckets, GradientReducer
from elasticdl.elastic.torch_kit.torch_state import TorchState


def test_a_mean_is_that_over_the_global_batch():
    """The last has two samples, for three workers; also once that step is made."""
    data, board = make_data(), Board(3)
    order = epoch_order(len(data), 0, 0)
    expected = [data[order[start : start + 16]][0].mean().item() for start in range(0, 50, 16)]

    def train(member):
        found = []
        for batch in member.loader:
            seen = []
            if batch.untaken:
                refused("called before the batch's last micro-batch", lambda: member.state.mean(0.0))
            for inputs, labels in batch:
                batch.backward(cross_entropy(member.model(inputs), labels))
                seen.append(inputs)
            own = torch.cat(seen).mean().item() if seen else torch.nan
            found.append(member.state.mean(own))
            member.optimizer.step()
            member.state.commit()
        assert member.state.mean(own) == found[-1]
        member.context.collective.world = replace(member.context.collective.world, version=2)
        assert member.state.mean(float(member.context.rank)) == pytest.approx(1.0), "in another world each counts alike"
        return found

    for found in in_threads(train, [Trainee(rank, board, BatchPolicy(16, None, 4)) for rank in range(3)]):
        assert found == pytest.approx(expected, abs=1e-6)


def test_one_backward_pass_for_all_micro_batches():
    """Cleared or not."""
    member, other = alone(batch_norm=True), alone(batch_norm=True)
    member.make_step(next(iter(member.loader)))
    batch = next(iter(other.loader))
    other.optimizer.zero_grad()
    sum(batch.weigh(cross_entropy(other.model(inputs), labels)) for inputs, labels in batch).backward()
    other.optimizer.step()
    torch.testing.assert_close(everything(member.model), everything(other.model))


def alone(policy=None, batch_norm=False, joins=True):
    return Trainee(0, Board(1), policy or BatchPolicy(16, None, 8), batch_norm=batch_norm, joins=joins)


def halve(parameter):
    parameter.grad.mul_(0.5)


def mask_and_halve(model):
    """Hooks that are called within each backward pass, on this worker's part: the first kind is linear."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * (torch.arange(gradient.numel()) % 2).view_as(gradient))
    next(model.parameters()).register_post_accumulate_grad_hook(halve)


@pytest.mark.parametrize("bucket_bytes", [1, buckets.BUCKET_BYTES])
def test_hooks_are_called_as_with_distributed_data_parallel(monkeypatch, bucket_bytes):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
    board = Board(3)
    members = [Trainee(rank, board, BatchPolicy(16, None)) for rank in range(3)]
    for member in members:
        mask_and_halve(member.model)
    in_threads(lambda member: member.train(2), members)
    mask_and_halve(model := make_model())
    losses = on_one_device(model, make_data(), 16)
    for member in members:
        torch.testing.assert_close(member.losses, losses, rtol=2e-5, atol=1e-6)


def test_a_scheduler_that_was_not_given_is_told_of_where_a_newcomer_begins_with_it_anew():
    member, told = alone(), []
    member.context.warn = told.append
    torch.optim.lr_scheduler.StepLR(member.optimizer, 1)
    member.state.sync(member.context.collective.world)
    (line,) = told
    assert line.startswith("a scheduler sets")


@pytest.mark.parametrize("name", ["stopping", "attributes", "reducer", "_rate", "step", "progress"])
def test_a_value_with_a_name_of_the_states_own_is_refused(name):
    member = alone(joins=False)
    words = rf"^TorchState\({name}=\.\.\.\): the state has a {name} of its own: give the value another name$"
    refused(words, lambda: TorchState(member.context, member.model, member.optimizer, None, {name: 100}))


def test_gradients_of_mixed_dtypes():
    a = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    b = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    reducer = GradientReducer(lambda: [a, frozen, b], [], SumOfThreads(0, Board(1)))
    reducer.open()
    (a.sum() * 2).backward()
    (b.sum() * 3).backward()
    reducer.add(torch.tensor(1.5), 4, weight=1.0, is_first=True)
    vote = reducer.close(leaving=True).vote
    assert (vote.leaving, vote.samples, vote.loss) == (True, 4, 1.5)
    assert a.grad.tolist() == [2.0] * 3
    assert b.grad.tolist() == [3.0] * 2
    assert frozen.grad is None


def test_a_constant_buffer_stays_the_same_to_the_bit_and_a_sparse_gradient_becomes_a_dense_one():
    mask, counter = torch.tensor([0.1, -torch.inf]), torch.tensor(3, dtype=torch.uint8)
    module = torch.nn.Module()
    module.register_buffer("mask", mask)
    module.register_buffer("counter", counter)
    reducer = GradientReducer(list, [module], SumOfThreads(0, Board(1)))
    reducer.open()
    for is_first in (True, False, False):
        reducer.reset_buffers()
        counter -= 1
        reducer.add(torch.tensor(1.0), 1, weight=1 / 3, is_first=is_first)
    reducer.close()
    assert mask.tolist() == [torch.tensor(0.1).item(), -torch.inf]
    assert counter == 2
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    Buckets([table.weight], [], SumOfThreads(0, Board(1))).finish()
    assert table.weight.grad.tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]


def test_dicts_of_other_kinds_arrive_as_such():
    """A newcomer's script counts with one that has a default; modules note the versions of their parts in theirs."""
    counts = defaultdict(int, a=torch.ones(2))
    module = torch.nn.BatchNorm1d(2).state_dict()
    tensors = []
    content = without_tensors({"counts": counts, "module": module}, torch.Tensor, tensors)
    back = with_tensors(content, tensors)
    assert back["counts"]["new"] == 0
    assert torch.equal(back["counts"]["a"], torch.ones(2))
    assert back["module"]._metadata == module._metadata
    assert list(back["module"]) == list(module)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(4, 1, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 5).T,
        torch.randn(3, 5)[:, ::2],  # with gaps: torch makes a contiguous gradient
    ],
)
def test_a_gradient_lies_in_memory_as_torch_has_made_it(weight, fused):
    """A fused optimizer takes the elements of both one after the other, as they lie there."""
    alone, summed = (torch.nn.Parameter(weight.detach().clone(memory_format=torch.preserve_format)) for _ in range(2))
    factor = torch.randn(weight.shape)
    for each in (alone, summed):
        (each * factor).sum().backward()
    Buckets([summed], [], SumOfThreads(0, Board(1))).finish()
    assert summed.grad.stride() == alone.grad.stride()
    for each in (alone, summed):
        torch.optim.SGD([each], lr=0.5, fused=fused and each is summed).step()
    torch.testing.assert_close(summed, alone)


def test_workers_with_a_parameter_in_another_memory_format_are_told():
    board = Board(2)
    members = [Trainee(rank, board, BatchPolicy(16, None)) for rank in range(2)]
    weight = members[1].model[0].weight
    weight.data = weight.data.T.contiguous().T
    in_threads(lambda each: refused("train different parameters, of which this one has 4: freeze", each.train), members)


# -- what a loop may have besides: a wrapped and compiled model, clipping, a schedule, layers that are frozen for a while --


class Rich(Trainee):
    def __init__(self, rank, board, dtype):
        super().__init__(rank, board, BatchPolicy(16, None, 4), model=make_model().to(dtype), values=self.values)
        self.dtype, self.compiled = dtype, torch.compile(self.model, backend="aot_eager")

    def values(self, _):
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.2, total_steps=8)
        return {"schedule": self.schedule}

    def make_step(self, batch):
        """Trains the last layer alone, then all, then the first alone, which had no gradient at first."""
        trained = {0: (False, True), 2: (True, True), 4: (True, False)}.get(self.state.step, ())
        for layer, is_trained in zip((self.model[0], self.model[2]), trained, strict=False):
            layer.requires_grad_(is_trained)
        for inputs, labels in batch:
            batch.backward(cross_entropy(self.compiled(inputs.to(self.dtype)), labels))
        self.state.reduce_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_several_workers_and_one_agree_as_far_as_the_numbers_reach(dtype, bound):
    alone, board = Rich(0, Board(1), dtype), Board(3)
    members = [Rich(rank, board, dtype) for rank in range(3)]
    alone.train(2)
    in_threads(lambda member: member.train(2), members)
    for member in members:
        torch.testing.assert_close(everything(member.model), everything(alone.model), rtol=0, atol=bound)


# -- what a forward pass moves, beside the gradients --


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
    on_one_device(model := Moving(), make_data(samples), batch, epochs=1)
    for found in train(Moving, samples, batch, micro_batch, workers):
        torch.testing.assert_close(found, everything(model), rtol=1e-4, atol=1e-5)


STEPS = each_batch("loss().backward()")


def test_a_plain_loop_moves_buffers_as_one_device_does_and_in_a_step_that_is_made_again_once():
    compare(STEPS, 3, make=Moving, samples=49, batch=16)  # the last batch has one sample
    compare(STEPS, loses=True, make=Moving)  # in pieces of the size that the survivor's part had before


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


def test_a_scripts_own_checkpoint_has_all_of_the_model_and_is_a_file_of_torchs_without_pickled_code(tmp_path):
    """Also a buffer that is not in the model's own state; no part is taken back if the world breaks while others are sent it."""
    ahead, again = (
        Trainee(0, Board(1), BatchPolicy(8, None, 8), model=Holds(count, torch.zeros(2), False), data=make_data(8))
        for _ in range(2)
    )
    ahead.train()
    torch.save(ahead.state.state_dict(), tmp_path / "last.pt")
    again.state.load_state_dict(torch.load(tmp_path / "last.pt", weights_only=True))
    lose_world(again.context)
    again.state.restore()
    assert again.state.progress == ahead.state.progress
    assert again.model.held.tolist() == [1.0, 1.0]
    torch.testing.assert_close(everything(again.model), everything(ahead.model), rtol=0, atol=0)
