"""A plain loop whose step is torn: what the script does to tensors, gradients and modes is done once, as on one device."""

import contextlib
import functools
import re
import threading
import weakref

import pytest
import torch
from elastic_kit import Board, PlainScript, SumOfThreads, in_threads
from front_end_kit import BreakingBoard, Lost, be_alone
from refusal_kit import refused
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.torch as elastic
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.torch.loop_host import ASKED_IN_TORN
from elasticdl.elastic.torch.prepare import PlainLoop
from elasticdl.elastic.torch_kit.agreements import ScriptPosition

TORN = 2  # steps are made before


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        self.register_buffer("temperature", torch.ones(()))
        self.alpha, self.calls = 1.0, 0

    def forward(self, x):
        self.calls += 1
        out = self.body(x) * self.alpha / self.temperature / (1 + self.calls / 100)
        return out * 4 if self.training else out


class Member:
    """One of two workers, of which the second is lost; or a script on one device."""

    def __init__(self, rank=None, board=None):
        torch.manual_seed(0)
        self.rank = rank
        self.model, self.head = Net(), torch.nn.Linear(3, 3)
        parameters = [*self.model.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
        x = torch.randn(72, 8, generator=torch.Generator().manual_seed(1))
        self.loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8)
        self.counter, self.table = torch.zeros(()), torch.zeros(4, 3)
        self.made, self.sent = [], []  # steps, and what others are told of those made once more
        self.warnings = []
        self.values = elastic.values(steps=0)
        if board is not None:
            values = {"prepared_0": self.values, "prepared_1": self.head}
            self.script = PlainScript(rank, board, self.model, self.optimizer, self.loader, values=values)
            self.script.context.warn = self.warnings.append
            self.script.context.change_world = self.change_world
            self.loader = self.script.loader
            self.elastic = PlainLoop(None)
            self.elastic._host = self.script.host

    def change_world(self, state, why):
        be_alone(self.script.context)
        self.sent.append(state.sent()["values"]["place"]["repeats"])

    def loss(self, x, y):
        return cross_entropy(self.model(x), y)

    def lose(self):
        if self.rank == 1 and len(self.made) >= TORN:
            self.script.context.collective._board.lose()

    def mean(self, value):
        self.lose()
        return value.item() if self.rank is None else self.script.host.mean(value)

    def step(self):
        self.lose()
        self.made.append(True)
        self.optimizer.step()
        assert self.rank is None or not self.elastic.catching_up(), "it has come later, and this one has not"
        self.optimizer.zero_grad()

    @property
    def found(self):
        tensors = [*self.model.state_dict().values(), *self.head.state_dict().values(), self.counter, self.table]
        flags = [each.requires_grad for each in self.model.parameters()]
        return [each.detach().clone() for each in tensors], (self.model.training, flags, self.values.state_dict())


def counts(member):
    """An annealing by an attribute of the model, and by a number of the loop's."""
    for number, (x, y) in enumerate(member.loader):
        member.model.alpha = 1 + number / 10
        member.values.steps += 1
        (member.loss(x, y) * min(member.values.steps / 30, 1)).backward()
        member.step()


def sums_up_after_the_pass(member):
    """As for a log, before the step."""
    for x, y in member.loader:
        member.loss(x, y).backward()
        member.counter += 1
        member.table[0].add_(2)
        member.step()


def looks_at_sizes(member):
    """As people write it between a loader and a loss."""
    for x, y in member.loader:
        images = x.view(x.shape[0], 2, 4)
        images = images.view(images.size(0), -1)
        both = member.model(torch.cat([images, images.flip(1)]))
        logits = both[: x.size(0)] + 0.1 * both[x.size(0) :]
        targets = torch.zeros(*logits.shape).scatter_(1, y[:, None], 1.0)
        loss = cross_entropy(logits.view(-1, logits.size(-1)), targets.argmax(1))
        (loss + 0.1 * both.square().sum() / x.size(0)).backward()
        member.step()


def asks_before_the_step(member):
    """It goes on in another world than it has begun in."""
    for x, y in member.loader:
        out = member.model(x)
        scale = member.mean(out.square().mean())
        (cross_entropy(out, y) * scale / 20).backward()
        member.step()


def asks_after_the_sum(member):
    for x, y in member.loader:
        out = member.model(x)
        hits, loss = (out.argmax(1) == y).float().mean(), cross_entropy(out, y)
        loss.backward()
        member.lose()
        torch.nn.utils.clip_grad_norm_(member.model.parameters(), 1.0)
        mean = member.script.host.mean if member.rank is not None else torch.Tensor.item
        member.counter += mean(hits) + mean(loss)
        member.step()


def fills_a_table(member):
    for x, y in member.loader:
        member.values.steps += 1
        member.table[member.values.steps % 4] = member.values.steps
        (member.loss(x, y) + (member.model(x) - member.table.mean(0) / 10).square().mean()).backward()
        member.step()


def accumulates(member):
    """The step is made of three batches, each in two passes, by a scaler."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for number, (x, y) in enumerate(member.loader):
        member.model.alpha = 1.0 + number
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number > 100):
            loss = member.loss(x, y)
        scaler.scale(loss / 3).backward()
        (member.loss(x, y) / 6).backward()
        if number % 3 == 2:
            member.step()


def drops_a_part(member):
    total = 0.0
    for number, (x, y) in enumerate(member.loader):
        (member.loss(x, y) + member.head(member.model(x)).square().mean()).backward()
        for parameter in member.model.body[0].parameters():
            parameter.grad = None
        member.head.bias.grad = torch.zeros(3)
        del member.head.weight.grad
        member.step()
        total += number + 0.5


def perturbs_its_samples(member):
    for x, y in member.loader:
        x.requires_grad_()
        member.loss(x, y).backward()
        member.loss(x.detach() + x.grad.sign(), y).backward()
        x.grad = None
        member.step()


def labels_itself(member):
    for x, y in member.loader:
        member.model.eval()
        member.model.body[2].bias.requires_grad = False
        with torch.no_grad():
            soft = member.model(x).softmax(1)
        member.model.train()
        out = member.model(x)
        (cross_entropy(out, y) + kl_div(out.log_softmax(1), soft, reduction="batchmean")).backward()
        member.model.body[2].bias.requires_grad = True
        member.step()


def loads_beside(member):
    """Samples without labels, of a loader that begins anew within the epoch."""
    unlabelled = TensorDataset(torch.arange(12 * 8.0).view(12, 8) / 50)
    beside = DataLoader(unlabelled, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2))
    given = (more for _ in range(9) for (more,) in beside)
    for x, y in member.loader:
        more = next(given)
        (member.loss(x, y) + member.model(more).square().mean()).backward()
        member.step()


@pytest.mark.parametrize(
    "loop",
    [
        counts,
        sums_up_after_the_pass,
        looks_at_sizes,
        accumulates,
        asks_after_the_sum,
        loads_beside,
    ],
)
def test_a_step_that_is_torn_is_made_as_on_one_device(loop):
    survivor = compare(loop)
    assert not survivor.warnings
    assert survivor.sent == [{}]


def compare(loop):
    """The survivor."""
    alone = Member()
    loop(alone)
    board = BreakingBoard(2)
    members = [Member(rank, board) for rank in range(2)]

    def train(member):
        try:
            loop(member)
        except Lost:
            return None
        return member.found

    (tensors, others), _ = in_threads(train, members)
    expected, expected_others = alone.found
    torch.testing.assert_close(tensors, expected, rtol=1e-4, atol=1e-5)
    assert others == expected_others
    return members[0]


def computes_with_a_size(member):
    for x, y in member.loader:
        with torch.no_grad():
            member.model.temperature.mul_(1.1)
        (cross_entropy(member.model(x), y, reduction="sum") / (2 * x.size(0))).backward()
        member.step()


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return -gradient


def has_a_function_of_its_own(member):
    for x, y in member.loader:
        out = member.model(x)
        (cross_entropy(out, y) + 0.01 * Reversed.apply(out).square().mean()).backward(retain_graph=True)
        member.step()


def has_a_loss_that_nobody_has_seen(member):
    """As of a scripted function."""
    for x, y in member.loader:
        out = member.model(x)
        with torch._C.DisableTorchFunction():
            loss = cross_entropy(out, y)
        loss.backward(retain_graph=True)
        member.step()


def changes_what_it_has_used(member):
    for x, y in member.loader:
        (member.loss(x, y) + 0 * member.counter).backward()
        member.counter.fill_(1)
        member.step()


def calls_in_other_modes(member):
    for x, y in member.loader:
        member.model.eval()
        with torch.no_grad():
            soft = member.model(x).softmax(1)
        member.model.train()
        out = member.model(x)
        (cross_entropy(out, y) + kl_div(out.log_softmax(1), soft, reduction="batchmean")).backward()
        member.step()


def calls_with_other_parameters(member):
    for x, y in member.loader:
        others = {name: each * 2 for name, each in member.model.named_parameters()}
        cross_entropy(torch.func.functional_call(member.model, others, (x,)), y).backward()
        member.step()


def changes_what_is_not_known(member):
    for x, y in member.loader:
        torch.nn.functional.relu(member.counter, True)
        member.loss(x, y).backward()
        member.step()


def looks_at_each_sample(member):
    for x, y in member.loader:
        out = member.model(x)
        losses = [cross_entropy(out[i], y[i]) for i in range(x.shape[0])]
        torch.stack(losses).mean().backward()
        member.step()


def goes_through_a_batch(member):
    for x, y in member.loader:
        sizes = [each.square().mean() for each in member.model(x)]
        (cross_entropy(member.model(x), y) + torch.stack(sizes).mean()).backward()
        member.step()


def cuts_a_batch(member):
    for x, y in member.loader:
        sizes = [each.square().mean() for each in member.model(x).split(4)]
        (cross_entropy(member.model(x), y) + 0 * torch.stack(sizes).mean()).backward()
        member.step()


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (asks_before_the_step, re.escape(ASKED_IN_TORN)),
        (looks_at_each_sample, "__getitem__ takes the samples of a batch apart"),
        (goes_through_a_batch, "unbind takes the samples of a batch apart"),
        (cuts_a_batch, "split takes the samples of a batch apart"),
        (computes_with_a_size, "size looks at a number before"),
        (fills_a_table, r"test_elastic_loop_torn.py:\d+: __setitem__ changes a tensor that was there before the batch"),
        (labels_itself, "changes a tensor that was there before the batch"),
        (changes_what_it_has_used, "since it was used, a tensor was changed that was there before the batch"),
        (calls_in_other_modes, "since it was called, the model has been set to another mode"),
        (drops_a_part, r"test_elastic_loop_torn.py:\d+: gradients are dropped before the step"),
        (perturbs_its_samples, "looks at the gradient of what comes of the batch"),
        (has_a_function_of_its_own, "takes what a torch.autograd.Function has made"),
        (has_a_loss_that_nobody_has_seen, "backward takes a tensor that was not made of this batch"),
        (calls_with_other_parameters, ".* or it was called with other parameters than its own, as by torch.func"),
        (changes_what_is_not_known, "relu changes a tensor that was there before the batch"),
    ],
)
def test_what_can_not_be_made_again_is_done_by_the_script_once_more(loop, words):
    survivor = compare(loop)
    (warning,) = survivor.warnings
    assert re.search(
        rf"was made by another pass through the script's loop \((/.*)?{words}.*\): what the loop counts", warning
    )
    repeated = survivor.script.host.participant.position.repeats
    assert repeated == {0: 1}
    is_tried = loop in (
        *(calls_with_other_parameters, calls_in_other_modes, changes_what_it_has_used),
        asks_before_the_step,
    )
    assert survivor.sent == [{} if is_tried else repeated], "known before it is tried"


@pytest.mark.parametrize(("loop", "more"), [(looks_at_sizes, 1), (computes_with_a_size, 1), (computes_with_a_size, 2)])
def test_all_make_as_many_passes_as_who_has_made_the_most(loop, more):
    """Of the workers that are left one can't make the step again, or has made another pass before another worker was lost."""
    alone = Member()
    loop(alone)
    board = BreakingBoard(2)
    members = [Member(rank, board) for rank in range(2)]
    seen, survivor = [], members[0]

    def change_world(state, why):
        be_alone(survivor.script.context)
        place = state.values["place"]
        place.repeats = {0: more}

    survivor.script.context.change_world = change_world

    def train(member):
        each_pass = member.model.register_forward_pre_hook(lambda *_: seen.append(member.rank))
        with contextlib.suppress(Lost):
            loop(member)
        each_pass.remove()

    in_threads(train, members)
    torch.testing.assert_close(survivor.found[0], alone.found[0], rtol=1e-4, atol=1e-5)
    assert seen.count(0) == len(survivor.loader) + more
    assert len(survivor.warnings) == 1


def test_members_of_a_world_agree_on_repetitions():
    board, places = Board(3), [ScriptPosition() for _ in range(3)]
    places[1].repeats = {0: 1, 1: 2}
    places[2].repeats = {0: 1}
    in_threads(lambda rank: places[rank].agree(SumOfThreads(rank, board)), range(3))
    assert [each.repeats for each in places] == [{0: 1, 1: 2}] * 3
    assert (places[0].passes_more(0), places[0].passes_more(1)) == (3, 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_that_changes_its_parameters_within_a_step_is_refused(workers):
    def perturb(member):
        for x, y in member.loader:
            weight = member.model.body[0].weight
            weight.data.add_(torch.full_like(weight, 0.1))
            member.loss(x, y).backward()
            member.step()

    board = Board(workers)
    words = r"test_elastic_loop_torn.py:\d+: add_ changes a parameter that is trained.* change it after optimizer.step"
    members = [Member(rank, board) for rank in range(workers)]
    in_threads(lambda member: refused(words, lambda: perturb(member)), members)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_step_of_one_worker_is_not_torn_and_none_but_its_first_is_noted(workers):
    def train(member):
        for x, y in member.loader:
            member.loss(x, y).backward()
            member.made.append(member.script.host.open_batches[0].tape.rests)
            member.optimizer.step()
            member.optimizer.zero_grad()

    board = Board(workers)
    members = [Member(rank, board) for rank in range(workers)]
    in_threads(train, members)
    first, *later = members[0].made
    assert not first
    assert set(later) == {workers == 1}


def test_nothing_that_was_computed_of_a_batch_outlives_its_backward_pass():
    """Who accumulates has no memory for the outputs of several batches."""
    alive, board = [], Board(2)

    def accumulate(member):
        outputs = []
        for x, y in member.loader:
            out = member.model(x)
            outputs.append(weakref.ref(out))
            cross_entropy(out, y).backward()
            del x, y, out
        alive.append(sum(each() is not None for each in outputs))
        member.optimizer.step()

    in_threads(accumulate, [Member(rank, board) for rank in range(2)])
    assert alive == [0, 0]


def test_what_a_model_counts_is_sent_as_before_the_step_that_is_torn_twice():
    board = BreakingBoard(2)
    members = [Member(rank, board) for rank in range(2)]
    sent = []

    def change_world(state, why):
        be_alone(members[0].script.context)
        dumped = state.sent()["attributes"]
        sent.append(dumped["changed"]["0:"]["calls"])
        if len(sent) == 1:
            members[0].script.context.advance = lambda activity: (_ for _ in ()).throw(WorldBroken("once more"))
        else:
            del members[0].script.context.advance

    members[0].script.context.change_world = change_world

    def train(member):
        with contextlib.suppress(Lost):
            counts(member)

    in_threads(train, members)
    assert sent in ([TORN - 1] * 2, [TORN] * 2)
    assert members[0].model.calls == len(members[0].loader)


def counts_in_each_pass(member):
    for x, y in member.loader:
        member.values.steps += 1
        (cross_entropy(member.model(x), y, reduction="sum") / int(x.size(0))).backward()
        member.counter.fill_(member.values.steps)
        member.step()


def test_what_the_script_counts_in_values_is_undone_with_a_torn_step():
    compare(counts_in_each_pass)


@pytest.mark.parametrize(
    ("dies", "twice"), [((TORN, "before"), 0), ((TORN, "after"), 1), ((8, "before"), 0), ((8, "after"), 1)]
)
def test_what_rank_0_may_not_have_done_its_heir_does(dies, twice):
    """From the parameters of that step, which by then may be another one's for the script."""
    board, rows, done = BreakingBoard(2), [], threading.Event()
    alone, *members = Member(), Member(0, board), Member(1, board)

    def write(step, rank, weight):
        rows.append((step, rank, weight.clone()))

    def train(member):
        for step, (x, y) in enumerate(member.loader):
            member.loss(x, y).backward()
            member.optimizer.step()
            with torch.no_grad():
                member.model.body[0].weight.mul_(0.9)
            member.optimizer.zero_grad()
            row = functools.partial(write, step, member.rank, member.model.body[0].weight.detach())
            for when in ("before", "after"):
                if member.rank == 0 and (step, when) == dies:
                    assert done.wait(30)
                    board.lose()
                if when == "before":
                    row() if member.rank is None else member.script.host.on_one(row)
            if member.rank == 1 and step == dies[0]:
                done.set()

    def work(member):
        member.script.context.end = lambda state: be_alone(member.script.context)
        try:
            train(member)
            member.script.host.finish()
        except Lost:
            pass

    train(alone)
    expected, rows[:] = [*rows], []
    in_threads(work, members)
    first = dies[0] + (dies[1] == "after")
    by = [(step, 0) for step in range(first)] + [(step, 1) for step in range(dies[0], 9)]
    assert sorted((step, rank) for step, rank, _ in rows) == sorted(by)
    assert len(rows) == 9 + twice
    for step, _, weight in rows:
        torch.testing.assert_close(weight, expected[step][2], rtol=1e-4, atol=1e-5)
