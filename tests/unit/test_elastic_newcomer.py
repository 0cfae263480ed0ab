"""A plain loop on a worker that comes later, and what is told in one line where its script can't do with that."""

import copy
import os
import random

import pytest
import torch
from elastic_kit import Board, PlainScript
from session_kit import FakeMaster
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from elasticdl.common.errors import UserError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.torch.loop_faults import OTHER_ORDER
from elasticdl.elastic.torch.newcomer import Hints
from elasticdl.elastic.torch_kit.data.own_loader import GlobalBatch
from elasticdl.elastic.torch_kit.participant.host import OpenBatch
from elasticdl.elastic.torch_kit.torch_job import ElasticContext
from elasticdl.elastic.training.runtime import ScriptRuntime

EPOCHS, BATCHES, STANDS = 3, 4, (1, 2)


def make_data(samples=60):
    pixels = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pixels, pixels[:, :3].argmax(1))


class Experts(torch.nn.Module):
    """Leaves in an attribute what its loss has a term of."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = torch.nn.Linear(8, 4), torch.nn.Linear(4, 3)

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        self.balance = shares.square().sum(1).mean()
        return self.out(shares)


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.out(x)


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = torch.nn.GRUCell(8, 4), torch.nn.Linear(4, 3)

    def forward(self, x, hidden=None):
        hidden = self.cell(x, hidden)
        return self.out(hidden), hidden


class Member:
    """A script in a job of one worker. ``join(state)``: what it finds in its first world. ``stands``: where it was told that the job does."""

    def __init__(self, make_model=Experts, stands=(0, 0), join=None, before=None, **options):
        torch.manual_seed(0)
        random.seed(0)
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if before:
            before(self)
        self.plain = DataLoader(make_data(), batch_size=15, **(options or {"shuffle": True}))
        script = PlainScript(0, Board(1), self.model, self.optimizer, self.plain)
        self.loader, self.host, self.job = script.loader, script.host, script.context
        self.job.session.jobs_place = lambda: stands
        self.kept = []
        real = self.job.join

        def joined(state):
            real(state)
            if join is not None:
                state.load_state_dict(join)
                for part in p.SaveScope:  # as when it is sent
                    state.save(part)

        self.job.join = joined

    def step(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if not self.host.is_idle:
            self.kept.append(copy.deepcopy(self.host.participant.state.state_dict()))


def train(member, loss_of=lambda member, x, y: cross_entropy(member.model(x), y), after=lambda member: None):
    for _ in range(EPOCHS):
        for x, y in member.loader:
            member.step(loss_of(member, x, y))
        after(member)


def require_as_others(**how):
    """Who comes in the middle ends with the parameters of the one that has trained all the time."""
    options = how.pop("options", dict)
    member = Member(**options())
    train(member, **how)
    late = Member(stands=STANDS, join=member.kept[STANDS[0] * BATCHES + STANDS[1]], **options())
    train(late, **how)
    for ours, theirs in zip(late.model.state_dict().values(), member.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


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


@pytest.mark.parametrize(
    ("make_model", "loss_of"), [(Experts, balanced), (with_features, penalised), (Experts, hardest)]
)
def test_a_newcomer_gets_through_what_the_others_do(make_model, loss_of):
    require_as_others(options=lambda: {"make_model": make_model}, loss_of=loss_of)


def test_a_model_is_run_once_on_the_way_if_its_answer_is_all():
    calls = []

    class Counted(torch.nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    member = Member(make_model=lambda: Counted(8, 3), stands=(2, 0))
    late = iter(member.loader)
    for _ in range(BATCHES):
        x, y = next(late)
        member.step(cross_entropy(member.model(x), y))
    assert calls == [15]


def test_weights_that_the_loop_gives_a_sampler_travel():
    def options():
        generator = torch.Generator().manual_seed(3)
        return {"sampler": WeightedRandomSampler(torch.ones(60), 60, generator=generator)}

    def reweigh(member):
        with torch.no_grad():
            x, y = make_data()[:]
            member.plain.sampler.weights = cross_entropy(member.model(x), y, reduction="none").double()

    require_as_others(options=options, after=reweigh)


@pytest.mark.parametrize(("of_model", "is_refused"), [(True, True), (False, False)])
def test_labels_that_a_newcomer_has_made_of_another_model_are_refused(of_model, is_refused):
    def relabel(member):
        x, y = member.plain.dataset.tensors
        made = member.model(x).argmax(1) if of_model else y
        member.plain.dataset.tensors = x, (made + 1) % 3

    member = Member()
    train(member, after=relabel)
    late = Member(stands=STANDS, join=member.kept[6])
    if is_refused:
        with pytest.raises(UserError, match=r"has changed its data, and in its training data .*tensors"):
            train(late, after=relabel)
        assert not late.kept
    else:
        train(late, after=relabel)
        assert torch.equal(late.model.gate.weight, member.model.gate.weight)


def test_what_the_loop_calls_of_a_model_that_was_copied_on_the_way_is_refused():
    member = Member()
    member.teacher = None
    train(member, of_a_teacher)
    late = Member(stands=STANDS, join=member.kept[6])
    late.teacher = None
    with pytest.raises(UserError, match="a copy of the model that this worker has made while it was catching up"):
        train(late, of_a_teacher)
    assert not late.kept, "no step was made of it"
    late.teacher(torch.zeros(1, 8))  # outside the loop
    early = Member(stands=STANDS, join=member.kept[6])
    early.teacher = copy.deepcopy(early.model)  # which is as everybody's
    train(early, of_a_teacher)


def test_a_model_that_is_copied_on_the_way_is_its_own():
    member = Member(make_model=Plain, stands=STANDS)
    x, _ = next(iter(member.loader))
    answer = member.model(x)
    copied = copy.deepcopy(member.model)
    with torch.no_grad():
        copied.out.bias += 1
    assert torch.allclose(copied(x), answer + 1)


def test_a_hidden_state_of_the_way_is_refused():
    def stateful(member, x, y):
        out, hidden = member.model(x, member.hidden)
        member.hidden = hidden.detach()
        return cross_entropy(out, y)

    member = Member(make_model=Recurrent, shuffle=False)
    member.hidden = None
    train(member, stateful)
    late = Member(make_model=Recurrent, stands=STANDS, join=member.kept[6], shuffle=False)
    late.hidden = None
    with pytest.raises(UserError, match="the model is called with what it has answered to a batch before"):
        train(late, stateful)
    assert not late.kept


def resumed(member):
    """As by a script's own checkpoint."""
    cross_entropy(member.model(torch.ones(2, 8)), torch.tensor([0, 1])).backward()
    member.optimizer.step()


@pytest.mark.parametrize(("begins", "comes"), [(None, resumed), (resumed, None)])
def test_a_newcomer_that_goes_on_from_a_checkpoint_of_the_job_is_refused(begins, comes):
    member = Member(before=begins)
    train(member)
    with pytest.raises(UserError, match="another optimizer's state than where the job began"):
        train(Member(stands=STANDS, join=member.kept[6], before=comes))
    train(Member(stands=STANDS, join=member.kept[6], before=begins))


def test_what_is_raised_on_the_way_is_said_to_be():
    member = Member(stands=STANDS)
    master = FakeMaster()
    runtime = ScriptRuntime(ElasticContext, torch.manual_seed, lambda: 0)
    runtime._context = ElasticContext(master.session, member.job.collective, BatchPolicy(15, None), seed=0)
    runtime._pid = os.getpid()
    host = member.host
    runtime.train_in_place(host.finish, lambda: host.hints.about(on_its_way=host.is_on_its_way))
    assert not host.hints.about(on_its_way=host.is_on_its_way), "it is not on its way yet"
    for _ in member.loader:
        break
    runtime._tell_failure(ValueError("no real batch"))
    assert "ValueError: no real batch; raised on a worker that was catching up" in master.last_word.message
    member = Member()
    for _ in member.loader:
        break
    assert not member.host.hints.about(on_its_way=member.host.is_on_its_way)


def test_another_part_than_before_is_told_where_the_script_raises():
    hints = Hints()
    batches = [GlobalBatch(0, number, 8 * number, list(range(8))) for number in range(2)]
    alone, shared = (batches[1].plan(workers).whole_run(0) for workers in (1, 2))
    last = OpenBatch(batches[0], batches[0].plan(1).whole_run(0), most=8)
    hints.given(batches[1], alone, last)
    assert not hints.about(on_its_way=False)
    hints.given(batches[1], shared, last)
    assert "this worker's part of a batch from 8 to 4 samples" in hints.about(on_its_way=False)


def of_one():
    model = torch.nn.Linear(8, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(make_data(16), batch_size=8)


def test_an_error_that_is_swallowed_is_raised_again():
    member = Member()
    swallowed, given = [], 0

    def go_on():
        nonlocal given
        for x, y in member.loader:
            given += 1
            try:
                member.optimizer.step()
                member.optimizer.step()
                cross_entropy(member.model(x), y).backward()
            except Exception as error:  # noqa: BLE001
                swallowed.append(error)

    with pytest.raises(UserError) as first:
        go_on()
    with pytest.raises(UserError) as second:
        go_on()
    with pytest.raises(UserError) as third:
        member.host.finish()
    assert swallowed == [first.value] == [second.value] == [third.value]
    assert given == 1


def test_what_the_script_raises_itself_may_be_swallowed():
    def closure():
        raise RuntimeError("out of memory")

    member = Member()
    for number, (x, y) in enumerate(member.loader):
        try:
            if number == 1:
                member.optimizer.step(closure)
            member.step(cross_entropy(member.model(x), y))
        except RuntimeError:
            continue
    assert member.host.fault is None


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [({"shuffle": True}, True), ({"shuffle": True, "generator": torch.Generator()}, False), ({}, False)],
)
def test_another_loaders_order_that_each_worker_would_draw_by_itself_is_refused(options, is_refused):
    def train_it():
        model, optimizer, loader = of_one()
        script = PlainScript(0, Board(1), model, optimizer, loader)
        other = DataLoader(make_data(16), batch_size=8, **options)
        for (x, y), (z, _) in zip(script.loader, other, strict=True):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y) + model(z).square().mean()
            model.eval()
            list(DataLoader(make_data(16), shuffle=True))  # of an evaluation
            model.train()
            loss.backward()
            optimizer.step()

    if not is_refused:
        train_it()
        return
    with pytest.raises(UserError) as refused:
        train_it()
    assert str(refused.value) == OTHER_ORDER
