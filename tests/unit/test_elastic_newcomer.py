"""A plain loop on a worker that comes later, with a checkpoint of its own perhaps, and what is told where its script can't do with that."""

import contextlib
import copy
import pickle
import random

import numpy as np
import pytest
import torch
from elastic_kit import make_data
from job_kit import Job
from loop_benches import PlainScript
from refusal_kit import require_refusal
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from elasticdl.common.errors import UserError

EPOCHS, BATCHES, STANDS = 3, 4, (1, 2)


def step_of(stands):
    return stands[0] * BATCHES + stands[1]


class Experts(torch.nn.Module):
    """Leaves in an attribute what its loss has a term of."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = torch.nn.Linear(8, 4), torch.nn.Linear(4, 3)

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        self.balance = shares.square().sum(1).mean()
        return self.out(shares)


def nothing(script): ...


class Comer(PlainScript):
    """Trains some epochs. ``after``: each. ``before``: it all. ``start``: see `Script`. Further options are the loader's."""

    def __init__(
        self, loss_of=PlainScript.loss, make=Experts, after=nothing, before=nothing, start=None, epochs=EPOCHS, **loader
    ):
        random.seed(0)
        np.random.seed(0)
        super().__init__(Comer.go, make)
        self.data = make_data(60)
        self.loader = DataLoader(self.data, batch_size=15, **(loader or {"shuffle": True}))
        self.loss_of, self.after, self.start, self.epochs = loss_of, after, start, epochs
        self.values.history = ()  # which travels
        self.passed, self.joined_at = 0, None
        before(self)

    def begun(self):
        self.context = self.job.contexts[0]
        join = self.context.join

        def joined(state):
            self.joined_at = self.passed
            join(state)

        self.context.join = joined

    def go(self):
        for _ in range(self.start or 0, self.epochs):
            for x, y in self.loader:
                self.make_step(x, y)
            self.after(self)

    def make_step(self, x, y):
        self.optimizer.zero_grad()
        self.loss_of(self, x, y).backward()
        self.optimizer.step()
        self.passed += 1

    @property
    def progress(self):
        return self.host.participant.state.progress

    @property
    def weights(self):
        return [*self.model.state_dict().values(), *self.head.state_dict().values()]


def train(script=None, **job):
    """A script that has trained as the only worker of a job."""
    script = script or Comer()
    job = Job(1, **job)
    (script.said,), _ = job.run(lambda _: script.train(job))
    return script


def come(member, script=None, told=STANDS):
    """The job of this member has gone on to the step after `STANDS`, wherever the script was told that it stands."""
    return train(script, finds=member.job.states[step_of(STANDS) + 1], place=told)


def require_same(late, member):
    assert late.said is member.said is None, late.said
    assert all(map(torch.equal, late.weights, member.weights))
    assert late.progress == member.progress


class OwnOrder(torch.utils.data.Sampler):
    """Draws from a generator of its own, or from one that can't be found, or by a number."""

    hidden = None

    def __init__(self, kind):
        self.kind, self.own, self.count = kind, np.random.default_rng(5), 0
        OwnOrder.hidden = np.random.default_rng(5)

    def __len__(self):
        return 60

    def __iter__(self):
        self.count += 1
        streams = {"own": self.own, "hidden": OwnOrder.hidden, "count": np.random.default_rng(self.count)}
        return iter(streams[self.kind].permutation(60).tolist())


def require_as_others(make=Comer, told=STANDS):
    """Who comes in the middle ends with the parameters of the one that has trained all the time."""
    member = train(make())
    late = come(member, make(), told)
    require_same(late, member)
    assert late.joined_at == step_of(told)


@pytest.mark.parametrize("told", [(0, 2), (1, 0)])
@pytest.mark.parametrize("kind", ["loader", "own", "hidden", "count"])
def test_it_passes_by_what_it_was_told_of_and_draws_the_order_of_the_others(kind, told):
    def make():
        if kind == "loader":
            return Comer(shuffle=True, generator=torch.Generator().manual_seed(5))
        return Comer(sampler=OwnOrder(kind))

    require_as_others(make, told)


@pytest.mark.parametrize(
    "loss_of",
    [
        # The head is beside the model.
        lambda script, x, y: script.loss(x, y) + script.head(script.model(x)).square().mean(),
        lambda script, x, y: script.loss(x, y) + script.model.balance,
        lambda script, x, y: cross_entropy(script.model(x), y, reduction="none").topk(15)[0].mean(),
    ],
)
def test_it_gets_through_what_the_others_do(loss_of):
    require_as_others(lambda: Comer(loss_of))


def test_it_passes_by_the_passes_that_train_and_no_others_and_has_what_the_script_remembers():
    seen = []

    @torch.no_grad()
    def evaluate(script):
        seen.append(sum(len(x) for x, _ in script.loader))
        script.values.history += (script.loss(*script.data[:]).item(),)

    member = train(Comer(after=evaluate))
    late = come(member, Comer(after=evaluate))
    require_same(late, member)
    assert seen == [60] * 2 * EPOCHS
    assert late.values.history == member.values.history
    assert len(late.values.history) == EPOCHS


def test_it_passes_by_once_more_what_others_were_given_once_more():
    member = train()
    state = pickle.loads(member.job.states[step_of(STANDS) + 1])
    state["values"]["place"]["repeats"] = {0: 2, 1: 2}
    late = train(finds=pickle.dumps(state), place=STANDS)
    require_same(late, member)
    assert late.passed == EPOCHS * BATCHES + 4


@pytest.mark.filterwarnings("error:Detected call of")  # torch's, where the optimizer's own step was not called before
@pytest.mark.parametrize("is_given", [True, False])
def test_rates_are_those_of_one_device(is_given):
    """Also of a scheduler that was not given: on a worker that comes later the script has stepped it as often."""

    class Scheduled(Comer):
        def __init__(self):
            super().__init__()
            self.scheduler, self.rates = OneCycleLR(self.optimizer, 0.2, total_steps=20), {}
            self.others = [self.scheduler] * is_given

        def make_step(self, x, y):
            if not self.host.is_idle:
                self.rates[self.passed] = self.optimizer.param_groups[0]["lr"]
            super().make_step(x, y)
            self.scheduler.step()

    member = train(Scheduled())
    assert [*member.rates] == [*range(EPOCHS * BATCHES)]
    late = come(member, Scheduled(), (0, 3))
    assert late.rates == {step: rate for step, rate in member.rates.items() if step > step_of(STANDS)}
    assert late.optimizer.param_groups[0]["lr"] == member.optimizer.param_groups[0]["lr"]


def test_it_has_the_rate_that_was_set_between_two_steps():
    sent = pickle.loads(train().job.states[step_of(STANDS) + 1]) | {"scheduled": [{"lr": 0.025}]}
    late = train(finds=pickle.dumps(sent), place=STANDS)
    assert (late.said, late.optimizer.param_groups[0]["lr"]) == (None, 0.025)


def test_what_it_was_sent_waits_until_it_has_arrived_and_is_sent_on_as_it_came():
    member = train()

    class Waiting(Comer):
        def make_step(self, x, y):
            state = self.host.participant.state
            if self.passed == 0:
                came = pickle.loads(member.job.states[step_of(STANDS) + 1])
                torch.testing.assert_close(state.sent()["model"], came["model"], rtol=0, atol=0)
                self.fresh = copy.deepcopy(self.model.state_dict())
                state.go_back()  # a world that breaks on the way takes nothing of it
            here = all(map(torch.equal, self.fresh.values(), self.model.state_dict().values()))
            assert here is state.waits is (self.passed <= step_of(STANDS))
            assert ("a worker that was catching up" in self.host.hint) is here, "where the script fails it is told"
            super().make_step(x, y)

    require_same(come(member, Waiting(), (0, 0)), member)


def test_what_the_loop_calls_of_a_model_that_was_copied_on_the_way_is_refused():
    def of_a_teacher(script, x, y):
        if not hasattr(script, "teacher"):
            script.teacher = copy.deepcopy(script.model)
        return script.loss(x, y) + (script.model(x) - script.teacher(x).detach()).square().mean()

    late = come(train(Comer(of_a_teacher)), Comer(of_a_teacher))
    require_refusal(late.said, "a copy of the model that this worker has made while it was catching up")
    assert late.progress.step == step_of(STANDS) + 1, "no step was made of it"
    late.teacher(torch.zeros(1, 8))  # outside the loop


class Failing(Comer):
    """``told``: what it has said to the master of how it failed."""

    def begun(self):
        super().begun()
        self.told = []
        self.context.fail = lambda message, traceback, *, users: self.told.append((message, users))


def test_a_script_that_ends_on_stand_ins_does_not_end_the_job():
    late = Failing(epochs=1)
    come(train(), late, (0, 2))
    ((message, users),) = late.told
    assert "where the job stands in epoch 2" in message
    assert not users


def test_who_finds_less_than_it_was_told_is_started_again():
    member = train(Failing(), place=STANDS)
    assert isinstance(member.said, SystemExit)
    ((message, users),) = member.told
    assert "started again" in message
    assert not users


def test_an_error_that_is_swallowed_is_raised_again():
    class Swallowing(Comer):
        def make_step(self, x, y):
            with contextlib.suppress(UserError):
                self.optimizer.step()
                self.optimizer.step()

    require_refusal(train(Swallowing()).said, "without a batch")


# -- a script that goes on from a checkpoint of its own, written at the end of each epoch --


@pytest.fixture
def checkpoints():
    """``checkpoints(EPOCHS, ...)``: a script that has read that of the first epochs, or from its top, where it has found no file. And who has written them."""
    written = []

    def write(script):
        written.append(copy.deepcopy((script.model.state_dict(), script.optimizer.state_dict())))

    def read(epochs, **options):
        def load(script):
            for one, state in zip((script.model, script.optimizer), written[epochs - 1], strict=True):
                one.load_state_dict(copy.deepcopy(state))

        return Comer(before=load if epochs else nothing, start=epochs, **options)

    read.write, read.member = write, train(Comer(start=0, after=write))
    return read


@pytest.mark.parametrize(
    ("told", "read", "passed"),
    # The last was told of a place before its checkpoint: the others evaluate still, before the next epoch begins.
    [(STANDS, 1, 2), (STANDS, 0, 6), ((0, 0), 1, 0), ((1, 0), 1, 0), ((0, BATCHES), 1, 0)],
)
def test_it_goes_on_from_what_the_script_has_written_after_an_epoch(checkpoints, told, read, passed):
    late = come(checkpoints.member, checkpoints(read), told)
    require_same(late, checkpoints.member)
    assert late.joined_at == passed


def test_a_checkpoint_that_is_ahead_of_the_job_is_refused():
    late = come(train(Comer(start=0)), Comer(start=3, epochs=5))
    require_refusal(late.said, r"start_epoch=3\) is ahead of the job, which stands in epoch 2")


def test_where_nobody_is_left_the_script_goes_on_from_its_own_checkpoint(checkpoints):
    anew = train(checkpoints(1, after=checkpoints.write))
    assert anew.progress.epoch == EPOCHS
    for read in (0, 2):
        later = train(checkpoints(read), finds=anew.job.states[max(anew.job.states)])
        assert (later.said, later.progress) == (None, anew.progress)


def test_a_script_with_an_empty_loop_ends_with_one_that_waits_at_its_end(checkpoints):
    at_end = pickle.dumps(checkpoints.member.host.participant.state.sent())
    late = train(checkpoints(EPOCHS), finds=at_end, place=(EPOCHS - 1, 3))
    assert late.progress.step == checkpoints.member.progress.step
    assert all(map(torch.equal, late.weights, checkpoints.member.weights))
