"""Plain loops with several optimizers, and with gradients that are made otherwise than by ``loss.backward()``."""

import copy

import pytest
import torch
from elastic_kit import Board, PlainScript, Trainee, in_threads
from refusal_kit import refused
from session_kit import joins_others
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.common.errors import UserError
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.torch.loop_host import LoopHost
from elasticdl.elastic.torch_kit.loop_state import LoopState
from elasticdl.elastic.torch_kit.refusals import Optimizers
from elasticdl.elastic.torch_kit.tensors import look_before_steps, refuse_others


class Member:
    """A body that steps on each batch, a head that steps more rarely, and a parameter beside the model."""

    def __init__(self, rank=None, board=None):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.body = torch.optim.AdamW([*self.model[0].parameters(), self.scale], lr=0.02)
        self.head = torch.optim.SGD(self.model[2].parameters(), lr=0.1, momentum=0.5)
        x = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
        self.script = None
        if board is not None:
            both = Optimizers([self.body, self.head])
            values = {"scales": torch.nn.ParameterList([self.scale])}
            self.script = PlainScript(rank, board, self.model, both, self.loader, values)
            self.loader = self.script.loader

    def loss(self, x, y):
        return mse_loss(self.model(x) * self.scale, y)

    @property
    def weights(self):
        return [each.detach().clone() for each in (*self.model.parameters(), self.scale)]


def rarely(member, note=lambda number: None):
    """What a head that does not step is given is thrown away."""
    for number, (x, y) in enumerate(member.loader):
        note(number)
        member.loss(x, y).backward()
        torch.nn.utils.clip_grad_norm_(member.model[2].parameters(), 0.5)
        member.body.step()
        if number % 3 == 2:
            member.head.step()
        member.body.zero_grad()
        member.head.zero_grad(set_to_none=bool(number % 2))


def never_used(member):
    for x, y in member.loader:
        member.loss(x, y).backward()
        member.body.step()
        member.model.zero_grad()
        member.scale.grad = None


def penalised(member):
    """Gradients that `torch.autograd.grad` returns are no parameter's."""
    for x, y in member.loader:
        member.body.zero_grad()
        member.head.zero_grad()
        x.requires_grad_(True)
        out = member.model(x) * member.scale
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (mse_loss(out, y) + 0.1 * (slope.norm(2, dim=1) - 1).pow(2).mean()).backward()
        member.body.step()
        member.head.step()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("loop", [rarely, never_used, penalised])
def test_several_optimizers_step_as_on_one_device(loop, workers):
    alone = Member()
    loop(alone)
    board = Board(workers)
    members = [Member(rank, board) for rank in range(workers)]
    in_threads(loop, members)
    for member in members:
        torch.testing.assert_close(member.weights, alone.weights, rtol=1e-4, atol=1e-5)


def test_what_is_beside_the_model_travels():
    old, new, sent = Member(0, Board(1)), Member(0, Board(1)), []

    def note(number):
        if number == 4:
            sent.append(copy.deepcopy(old.script.host.participant.state.state_dict()))

    rarely(old, note)
    joins_others(new.script.context, sent[0])
    rarely(new)
    torch.testing.assert_close(new.weights, old.weights)


def for_a_gan(member, x, y):
    member.loss(x, y).backward()
    member.body.step()
    member.loss(x, y).backward()


def beside(member, x, y):
    member.loss(x, y).backward()
    torch.autograd.backward(member.loss(x, y))
    member.body.step()


def before(member, x, y):
    torch.autograd.backward(member.loss(x, y))
    member.loss(x, y).backward()


def assigned(member, x, y):
    member.scale.grad = torch.ones_like(member.scale)
    member.head.step()


def by_parameters(member, x, y):
    slopes = torch.autograd.grad(loss := member.loss(x, y), [x, member.model[0].weight], create_graph=True)
    (loss * slopes[1].norm()).backward()


def by_a_parameter(member, x, y):
    torch.autograd.grad(outputs=member.loss(x, y), inputs=member.scale)


def kept_for_a_later_step(member, x, y):
    member.loss(x, y).backward()
    member.body.step()
    member.body.zero_grad()
    next(member.batches)
    member.loss(x, y).backward()


def in_a_closure(member, x, y):
    def closure():
        torch.autograd.backward(loss := member.loss(x, y))
        return loss

    member.body.step(closure)


def of_a_sum(member, x, y):
    mse_loss(member.model(x), y, reduction="sum").backward()


OTHERWISE = "gradients were made otherwise than by loss.backward"
OTHERWISE_HERE = r"otherwise than by batch.backward\(loss\)"


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (for_a_gan, "as for a GAN: a plain loop has one sum"),
        (of_a_sum, "the loss is a sum over the samples"),
        (kept_for_a_later_step, "the gradients of an earlier batch are still there: .* also of one that does not step"),
        *((each, OTHERWISE) for each in (beside, before, assigned, in_a_closure)),
        *(
            (each, r"^torch.autograd.grad\(\) by a parameter that is trained")
            for each in (by_parameters, by_a_parameter)
        ),
    ],
)
def test_what_can_not_be_summed_is_refused_in_one_line(use, words):
    member = Member(0, Board(1))
    member.batches = iter(member.loader)
    x, y = next(member.batches)
    x.requires_grad_()
    refused(words, lambda: use(member, x, y))
    member.batches.close()


# The loop of the library; each is called with a micro-batch and the loss that its backward pass is made of.


def a_term_beside(member, batch, inputs, loss):
    torch.autograd.backward(member.model(inputs).square().mean())
    batch.backward(loss)


def a_term_after(member, batch, inputs, loss):
    batch.backward(loss)
    if batch.untaken:
        member.model(inputs).square().mean().backward()


def assigned_before(member, batch, inputs, loss):
    member.model[0].bias.grad = torch.ones(16)
    batch.backward(loss)


def a_sum(member, batch, inputs, loss):
    batch.backward(member.model(inputs).square().sum())


def not_the_batchs(member, batch, inputs, loss):
    loss.backward()


@pytest.mark.parametrize(
    ("use", "words"),
    [
        *((each, OTHERWISE_HERE) for each in (a_term_beside, a_term_after, assigned_before, not_the_batchs)),
        (a_sum, "the loss is a sum over the samples"),
    ],
)
def test_the_librarys_loop_refuses_them_as_well(use, words):
    member = Trainee(0, Board(1), BatchPolicy(16, None, 6))

    def make_step(batch):
        for inputs, labels in batch:
            use(member, batch, inputs, cross_entropy(member.model(inputs), labels))
        member.optimizer.step()

    batch = next(steps := member.steps())
    refused(words, lambda: make_step(batch))
    steps.close()


def test_a_worker_that_ends_before_the_others_is_told_of_whatever_rides(monkeypatch):
    monkeypatch.setattr(LoopHost, "rides", lambda _: {"number": [1.0]})
    monkeypatch.setattr(LoopHost, "heard", lambda _, rides: bool(rides["number"] == 2))
    board = Board(2)

    def ended(rank):
        member = Member(rank, board)

        def leave(number):
            if rank and number == 3:
                member.script.host.finish()

        with pytest.raises(UserError, match="1 of 2 workers ended their training after step 3 and the others go on"):
            rarely(member, leave)

    in_threads(ended, range(2))


def test_a_scheduler_that_was_not_given_is_told_of_where_a_newcomer_begins_with_it_anew():
    member, told = Trainee(0, Board(1), BatchPolicy(16, None)), []
    member.context.warn = told.append
    torch.optim.lr_scheduler.StepLR(member.optimizer, 1)
    member.state.sync(member.context.collective.world)
    (line,) = told
    assert line.startswith("a scheduler sets")


def test_parameters_that_are_in_no_module_that_was_given_are_refused():
    model, norm = torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD([*model.parameters(), *norm.parameters()], lr=0.1)
    context = Trainee(0, Board(1), BatchPolicy(16, None)).context
    refused(
        r"^parameters of the optimizer, of the shapes \(2,\), \(2,\), are in no module that was given, .* torch.nn.ParameterList",
        lambda: LoopState(context, model, optimizer, {}),
    )
    LoopState(context, model, optimizer, {"norm": norm})


@pytest.mark.parametrize("is_models", [True, False])
def test_an_optimizer_that_was_not_prepared_is_refused_within_a_loop(is_models):
    board = Board(2)

    def train(rank):
        member, beside = Member(), torch.nn.Parameter(torch.zeros(1))
        if is_models:
            member.model[1].bias = beside
        own = torch.optim.SGD([beside], lr=0.1)
        values = {"scales": torch.nn.ParameterList([member.scale])}
        script = PlainScript(rank, board, member.model, Optimizers([member.body, member.head]), member.loader, values)
        for x, y in script.loader:
            member.body.zero_grad()
            member.head.zero_grad()
            (member.loss(x, y) + (beside - 1).square().sum()).backward()
            member.body.step()
            member.head.step()
            refused(
                "^SGD steps while a batch is trained on, and was not given before: .* give it to elastic.prepare, too",
                own.step,
            )
            break
        own.step()  # as it likes, behind the loop
        return beside.item() != 0

    assert in_threads(train, range(2)) == [True, True]


def test_an_optimizer_that_was_made_anew_within_training_is_refused():
    """One within a prepared one, which steps the same groups, is that one's."""
    model = torch.nn.Linear(2, 1)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    within, anew = torch.optim.SGD(given.param_groups), torch.optim.SGD(model.parameters(), lr=0.01)
    within.param_groups = given.param_groups
    refuse_others(given, lambda: True, "give it along")
    given.step()
    within.step()
    refused("^SGD steps while a batch is trained on, and was not given before", anew.step)
    look_before_steps("others", None)
