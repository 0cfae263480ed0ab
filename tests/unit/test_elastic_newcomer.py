"""A plain loop on a worker that comes later, and what is told in one line where its script can't do with that."""

import contextlib
import copy
import os
import random

import numpy as np
import pytest
import torch
from newcomer_kit import BATCHES, EPOCHS, STANDS, Experts, Member, late_of, make_data, plain_loss, train
from refusal_kit import refused
from session_kit import FakeMaster
from torch.nn.functional import cross_entropy

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.training.runtime import ScriptRuntime


def require_as_others(stands=STANDS, options=dict, **how):
    """Who comes in the middle ends with the parameters of the one that has trained all the time."""
    member = Member(**options())
    train(member, **how)
    late = late_of(member, stands, **options())
    train(late, **how)
    for ours, theirs in zip(late.model.state_dict().values(), member.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert late.orders == {epoch: order for epoch, order in member.orders.items() if epoch in late.orders}
    assert late.joined_at == stands[0] * BATCHES + stands[1]
    assert late.host.finish().progress == member.host.finish().progress


OF_A_CLOSURE = np.random.default_rng(5)


class OwnOrder(torch.utils.data.Sampler):
    """Draws from generators of its own, of which one can't be found."""

    def __init__(self, kind):
        self.kind = kind
        self.numpy, self.legacy = np.random.default_rng(5), np.random.RandomState(5)
        self.python, self.lazy, self.count = random.Random(5), None, 0
        global OF_A_CLOSURE
        OF_A_CLOSURE = np.random.default_rng(5)

    def __len__(self):
        return 60

    def __iter__(self):
        self.count += 1
        if self.kind == "lazy":
            self.lazy = self.lazy or torch.Generator().manual_seed(5)
        order = {
            "numpy": lambda: self.numpy.permutation(60).tolist(),
            "legacy": lambda: self.legacy.permutation(60).tolist(),
            "python": lambda: self.python.sample(range(60), 60),
            "lazy": lambda: torch.randperm(60, generator=self.lazy).tolist(),
            "count": lambda: np.random.default_rng(self.count).permutation(60).tolist(),
            "closure": lambda: OF_A_CLOSURE.permutation(60).tolist(),
        }
        return iter(order[self.kind]())


@pytest.mark.parametrize("stands", [(0, 0), (0, 2), (1, 0), (1, 2)])
@pytest.mark.parametrize("kind", ["loader", "numpy", "legacy", "python", "lazy", "count", "closure"])
def test_a_newcomer_passes_by_what_it_was_told_of_and_draws_the_order_of_the_others(kind, stands):
    def options():
        if kind == "loader":
            return {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
        return {"sampler": OwnOrder(kind)}

    require_as_others(stands, options)


def with_batch_norm():
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))


def test_where_all_go_on_from_a_kept_state_each_ends_with_what_was_kept():
    """All are on their way at once, and one sends the others what it has read."""
    member = Member(with_batch_norm)
    train(member)
    reads = Member(with_batch_norm, join=member.kept[STANDS[0] * BATCHES + STANDS[1]])
    next(iter(reads.loader))
    assert reads.host.is_catching_up
    receives = Member(with_batch_norm, join=copy.deepcopy(reads.host.participant.state.sent()))
    train(receives)
    torch.testing.assert_close(receives.model.state_dict(), member.model.state_dict(), rtol=0, atol=0)


FEATURES = {}


def with_features():
    model = Experts()
    model.gate.register_forward_hook(lambda module, given, made: FEATURES.update(made=made))
    return model


def balanced(member, x, y):
    return cross_entropy(member.model(x), y) + member.model.balance


def penalised(member, x, y):
    return cross_entropy(member.model(x), y) + FEATURES["made"].abs().mean()


def hardest(member, x, y):
    return cross_entropy(member.model(x), y, reduction="none").topk(15).values.mean()


def of_a_teacher(member, x, y):
    if member.teacher is None:
        member.teacher = copy.deepcopy(member.model)
    return cross_entropy(member.model(x), y) + (member.model(x) - member.teacher(x).detach()).square().mean()


def of_slopes(member, x, y):
    """A penalty on the gradient by the input, and a term of the derivative after that."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(member.model(x).exp().sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return slope.square().mean() + bend.square().mean()


@pytest.mark.parametrize(
    ("make_model", "loss_of"),
    [(Experts, balanced), (with_features, penalised), (Experts, hardest), (lambda: torch.nn.Linear(8, 3), of_slopes)],
)
def test_a_newcomer_gets_through_what_the_others_do(make_model, loss_of):
    require_as_others(options=lambda: {"make_model": make_model}, loss_of=loss_of)


def test_a_newcomer_may_look_at_the_gradients_of_all_parameters():
    def make_model():
        return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 3))

    member = Member(make_model)
    train(member)
    late = late_of(member, make_model=make_model)
    for number, (x, y) in enumerate(late.loader):
        late.optimizer.zero_grad()
        plain_loss(late, x, y).backward()
        assert all(each.grad.count_nonzero() == 0 for each in late.model.parameters()), f"batch {number}"
        late.optimizer.step()


def test_a_newcomer_passes_by_the_passes_that_train_and_no_others():
    seen = []

    @torch.no_grad()
    def evaluate(member):
        seen.append(sum(len(x) for x, _ in member.loader))

    require_as_others(after=evaluate)
    assert seen == [60] * 2 * EPOCHS


def test_a_newcomer_passes_by_once_more_what_others_were_given_once_more():
    member = Member()
    train(member)
    kept = member.kept[STANDS[0] * BATCHES + STANDS[1]]
    kept["values"]["place"]["repeats"] = {0: 2, 1: 2}
    late, passes = late_of(member), []
    for epoch in range(EPOCHS):
        for number, (x, y) in enumerate(late.loader):
            passes.append((epoch, number, late.host.is_idle))
            late.step(plain_loss(late, x, y))
    trained = [(epoch, number) for epoch, number, is_idle in passes if not is_idle]
    assert trained == [(1, 3 + 4), *((2, number) for number in range(BATCHES))]
    assert len(passes) == EPOCHS * BATCHES + 4
    torch.testing.assert_close(late.model.state_dict(), member.model.state_dict(), rtol=0, atol=0)


def test_what_the_script_remembers_travels():
    def remember(member):
        with torch.no_grad():
            x, y = make_data()[:]
            member.values.history += (cross_entropy(member.model(x), y).item(),)

    member = Member()
    train(member, after=remember)
    late = late_of(member)
    train(late, after=remember)
    assert late.values.history == member.values.history
    assert len(late.values.history) == EPOCHS


@pytest.mark.parametrize(("told", "epochs", "batches"), [((1, 2), 1, 0), ((1, 2), 1, 1), ((0, 2), 0, 3)])
def test_a_newcomer_whose_script_ends_on_stand_ins_does_not_end_the_job(told, epochs, batches):
    member = Member()
    train(member)
    late, said = late_of(member, told), []
    late.job.fail = lambda message, traceback, *, users: said.append((message, users))
    late.host._on_left = lambda: said.append("left")
    for _ in range(epochs):
        for x, y in late.loader:
            late.step(plain_loss(late, x, y))
    for number, (x, y) in enumerate(late.loader if batches else ()):
        late.step(plain_loss(late, x, y))
        if number + 1 == batches:
            break
    assert late.host.finish() is None
    (message, users), left = said
    assert "\n" not in message
    assert "where the job stands in epoch 2" in message
    assert (users, left) == (False, "left")


@pytest.mark.parametrize("told", [(EPOCHS - 1, BATCHES), (EPOCHS, 0)])
def test_a_newcomer_whose_script_comes_to_its_end_where_the_others_wait_ends_with_them(told):
    member = Member()
    train(member)
    late = Member(stands=told, join=member.kept[-1])
    train(late)
    assert late.host.finish().progress.step == member.host.finish().progress.step


def test_a_newcomer_that_finds_less_than_it_was_told_is_started_again():
    member, told = Member(stands=(1, 2)), []
    member.job.fail = lambda message, traceback, *, users: told.append((message, users))
    with pytest.raises(SystemExit) as ended:
        train(member)
    assert ended.value.code == 1
    ((message, users),) = told
    assert "started again" in message
    assert not users


def test_labels_that_all_make_anew_are_those_of_the_others():
    def relabel(member):
        x, y = member.plain.dataset.tensors
        member.plain.dataset.tensors = x, (y + 1) % 3

    require_as_others(after=relabel)


def test_what_a_newcomer_was_sent_waits_until_it_has_arrived_and_is_sent_on_as_it_came():
    member = Member()
    train(member)
    late = late_of(member, stands=(0, 0))
    fresh = copy.deepcopy(late.model.state_dict())
    batches = iter(late.loader)
    next(batches)
    state = late.host.participant.state
    assert state.waits
    assert state.sent() is member.kept[STANDS[0] * BATCHES + STANDS[1]]
    assert state.progress.epoch == STANDS[0]
    assert all(torch.equal(each, late.model.state_dict()[name]) for name, each in fresh.items())
    state.go_back()
    assert state.waits, "a world that breaks on the way takes nothing of it"
    late.host.participant.arrive()
    assert not state.waits
    assert not any(torch.equal(each, late.model.state_dict()[name]) for name, each in fresh.items())


def test_what_the_loop_calls_of_a_model_that_was_copied_on_the_way_is_refused():
    member = Member()
    member.teacher = None
    train(member, of_a_teacher)
    late = late_of(member)
    late.teacher = None
    refused("a copy of the model that this worker has made while it was catching up", lambda: train(late, of_a_teacher))
    assert not late.kept, "no step was made of it"
    late.teacher(torch.zeros(1, 8))  # outside the loop
    early = late_of(member)
    early.teacher = copy.deepcopy(early.model)  # which is as everybody's
    train(early, of_a_teacher)


def test_what_is_raised_on_the_way_is_said_to_be():
    member, of_the_job = Member(stands=STANDS), Member()
    master = FakeMaster()
    runtime = ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 0)
    runtime._context = ElasticContext(master.session, member.job.collective, BatchPolicy(15, None), seed=0)
    runtime._pid = os.getpid()
    host = member.host
    runtime.train_in_place(host.finish, lambda: host.hint)
    assert not host.is_on_its_way, "it is not yet"
    for each in (member, of_the_job):
        next(iter(each.loader))
    assert (host.is_on_its_way, of_the_job.host.is_on_its_way) == (True, False)
    runtime._tell_failure(ValueError("no real batch"))
    assert "ValueError: no real batch; raised on a worker that was catching up" in master.last_word.message
    assert not of_the_job.host.hint


def test_an_error_that_is_swallowed_is_raised_again():
    member = Member()
    swallowed = []

    def go_on():
        for _ in member.loader:
            try:
                member.optimizer.step()
                member.optimizer.step()
            except Exception as error:  # noqa: BLE001
                swallowed.append(error)

    for use in (go_on, go_on, member.host.finish):
        with pytest.raises(UserError) as told:
            use()
        assert swallowed == [told.value]


def test_what_the_script_raises_itself_may_be_swallowed():
    member = Member()
    for number, (x, y) in enumerate(member.loader):
        with contextlib.suppress(ZeroDivisionError):
            if number == 1:
                member.optimizer.step(lambda: 1 / 0)
            member.step(plain_loss(member, x, y))
    assert member.host.fault is None
