"""The PyTorch twin in a world of one, and with a stand-in for the sums of several workers; gradients in several buckets."""

from collections import defaultdict

import pytest
import torch
from elastic_kit import Board, SumOfThreads, Trainee, in_threads, make_data, plain_losses, train_together
from refusal_kit import refused
from session_kit import enter, lose_world
from torch.nn.functional import cross_entropy

from elasticdl.elastic.collectives.transfer import with_tensors, without_tensors
from elasticdl.elastic.core.plan import BatchPolicy, epoch_order
from elasticdl.elastic.torch.prepare import PlainLoop
from elasticdl.elastic.torch_kit import reducer as buckets
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader
from elasticdl.elastic.torch_kit.reducer import Buckets, GradientReducer
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_state import TorchState
from elasticdl.elastic.training.runtime import ScriptRuntime


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_micro_batches_on_any_number_of_workers_give_the_losses_of_plain_torch(workers):
    for member in train_together(workers, BatchPolicy(16, None, 4)):
        torch.testing.assert_close(member.losses, plain_losses(16), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_mean_is_that_over_the_global_batch(workers):
    data, board = make_data(), Board(workers)
    order = epoch_order(len(data), 0, 0)
    expected = [
        data[order[start : start + 16]][0].mean().item() for start in range(0, 50, 16)
    ]  # the last has two samples

    def train(member):
        runtime = ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 0)
        runtime.in_training = member.state
        loop, found = PlainLoop(runtime), []
        for batch in member.loader:
            seen = []
            for inputs, labels in batch:
                batch.backward(cross_entropy(member.model(inputs), labels))
                seen.append(inputs)
            own = torch.cat(seen).mean() if seen else torch.tensor(torch.nan)
            found.append(loop.mean(own))
            member.optimizer.step()
            assert loop.mean(own) == found[-1]
            member.state.commit()
        assert loop.mean(own) == found[-1]
        return found

    for found in in_threads(train, [Trainee(rank, board, BatchPolicy(16, None, 4)) for rank in range(workers)]):
        assert found == pytest.approx(expected, abs=1e-6)


def test_a_mean_of_some_of_the_micro_batches_is_refused():
    member = Trainee(0, Board(2), BatchPolicy(16, None, 4))
    batch = next(iter(member.loader))
    next(iter(batch))
    refused("call it after the loop over micro-batches", lambda: member.state.mean(1.0))


@pytest.mark.parametrize("workers", [2, 4])
def test_buffers_do_not_depend_on_the_number_of_workers(workers):
    # 24 samples in micro-batches of 2: of one worker twelve in a row, of four workers three each
    policy = BatchPolicy(24, None, 2)
    (alone,), members = (train_together(size, policy, batch_norm=True) for size in (1, workers))
    expected = alone.model[1].state_dict()
    assert expected["num_batches_tracked"] == alone.state.step == 4
    for member in members:
        for name, value in member.model[1].state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def holding(**buffers):
    module = torch.nn.Module()
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def test_a_constant_buffer_stays_the_same_to_the_bit():
    mask, counter = torch.tensor([0.1, -torch.inf]), torch.tensor(3, dtype=torch.uint8)
    reducer = GradientReducer(list, [holding(mask=mask, counter=counter)], SumOfThreads(0, Board(1)))
    reducer.open()
    for is_first in (True, False, False):
        reducer.reset_buffers()
        counter -= 1
        reducer.add(torch.tensor(1.0), 1, weight=1 / 3, is_first=is_first)
    reducer.close()
    assert mask.tolist() == [torch.tensor(0.1).item(), -torch.inf]
    assert counter == 2


def test_one_backward_pass_for_all_micro_batches():
    """Cleared or not."""
    member, other = alone(batch_norm=True), alone(batch_norm=True)
    member.make_step(next(iter(member.loader)))
    batch = next(iter(other.loader))
    other.optimizer.zero_grad()
    sum(batch.weigh(cross_entropy(other.model(inputs), labels)) for inputs, labels in batch).backward()
    other.optimizer.step()
    for mine, its in zip(member.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, its)


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
@pytest.mark.parametrize("workers", [1, 3])
def test_hooks_are_called_as_with_distributed_data_parallel(monkeypatch, workers, bucket_bytes):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
    members = [
        Trainee(rank, board, BatchPolicy(16, None, None)) for board in [Board(workers)] for rank in range(workers)
    ]
    for member in members:
        mask_and_halve(member.model)
    in_threads(lambda member: member.train(2), members)
    for member in members:
        torch.testing.assert_close(member.losses, plain_losses(16, prepare=mask_and_halve), rtol=2e-5, atol=1e-6)


def test_a_scheduler_that_was_not_given_is_told_of_where_a_newcomer_begins_with_it_anew():
    member, told = alone(), []
    member.context.warn = told.append
    torch.optim.lr_scheduler.StepLR(member.optimizer, 1)
    member.state.sync(member.context.collective.world)
    (line,) = told
    assert line.startswith("a scheduler sets")


def test_the_same_random_draws_in_a_repeated_step():
    member = alone()
    next(iter(member.loader))
    first = torch.rand(3)
    next(iter(member.loader))
    assert torch.equal(first, torch.rand(3))


def test_values_of_the_user_travel_with_the_state():
    member = alone(joins=False)
    scheduler = torch.optim.lr_scheduler.StepLR(member.optimizer, 1)
    state = TorchState(member.context, member.model, member.optimizer, None, {"best": 0.5, "scheduler": scheduler})
    enter(member.context, member.context.world)
    state.best = 0.7
    state.commit()
    state.best = 0.9
    lose_world(member.context)
    assert state.best == 0.7
    assert state.state_dict()["values"]["scheduler"]["last_epoch"] == 0
    with pytest.raises(AttributeError, match="TorchState\\(worst="):
        _ = state.worst


def test_a_value_with_a_name_of_the_states_own_is_refused_in_one_line():
    """Whatever the state has by that name would be another, or the value would."""
    member = alone(joins=False)
    own = {name for name in vars(member.state) if not name.startswith("_")}
    assert own >= {"stopping", "attributes", "reducer"}
    for name in (*own, "_rate", "step", "loss", "progress", "vote"):
        words = rf"^TorchState\({name}=\.\.\.\): the state has a {name} of its own: give the value another name$"
        refused(words, lambda n=name: TorchState(member.context, member.model, member.optimizer, None, {n: 100}))


def test_a_loader_of_nobody_says_what_to_do():
    member = alone()
    loader = ElasticDataLoader(member.context, make_data())
    with pytest.raises(RuntimeError, match="TorchState"):
        next(iter(loader))


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


def test_a_scripts_own_checkpoint_is_a_file_of_torchs_without_pickled_code(tmp_path):
    """docs/library.md shows a script that writes and reads one."""
    ahead, again = alone(batch_norm=True), alone(batch_norm=True)
    ahead.train()
    torch.save(ahead.state.state_dict(), tmp_path / "last.pt")
    again.state.load_state_dict(torch.load(tmp_path / "last.pt", weights_only=True))
    assert again.state.progress == ahead.state.progress
    for mine, its in zip(again.model.state_dict().values(), ahead.model.state_dict().values(), strict=True):
        assert torch.equal(mine, its)


def test_a_world_that_breaks_while_others_are_sent_what_was_loaded_takes_no_part_of_it_back():
    ahead, loader = (Trainee(0, Board(1), BatchPolicy(16, None, None), batch_norm=True) for _ in range(2))
    ahead.train()
    loader.state.load_state_dict(ahead.state.state_dict())
    lose_world(loader.context)
    loader.state.restore()
    for mine, its in zip(loader.model.state_dict().values(), ahead.model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, its)
    assert loader.state.progress == ahead.state.progress


POLICY = BatchPolicy(16, None, 4)


def trainees(workers, kind=Trainee):
    board = Board(workers)
    return [kind(rank, board, POLICY) for rank in range(workers)]


def test_a_sparse_gradient_becomes_a_dense_one():
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    Buckets([table.weight], [], SumOfThreads(0, Board(1))).finish()
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
    Buckets([summed], [], SumOfThreads(0, Board(1))).finish()
    assert summed.grad.stride() == alone.grad.stride()
    for each in (alone, summed):
        torch.optim.SGD([each], lr=0.5, fused=fused and each is summed).step()
    torch.testing.assert_close(summed, alone)


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
