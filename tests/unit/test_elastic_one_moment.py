"""Weights, learning rate, schedule and the user's values go back together, wherever in an epoch the world breaks."""

import itertools

import pytest
import torch
from elastic_kit import Board, SumOfThreads, break_alone, make_data, make_model
from refusal_kit import refused
from session_kit import alone, let_break, lose_world
from test_elastic_schedulers import SCHEDULERS
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler as schedulers

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader
from elasticdl.elastic.torch_kit.tensors import ElasticContext
from elasticdl.elastic.torch_kit.torch_state import TorchState

EPOCHS, STEPS = 2, 3  # of 50 samples, 20 at a time
# At which point, and how often it has been passed before.
POINTS = [
    *itertools.product(["before step", "after step", "after commit"], [0, STEPS - 1, STEPS]),
    *itertools.product(["end of epoch", "after evaluation", "after scheduler"], [0, 1]),
]


class Training:
    """One worker whose world breaks once, in the first collective after it has come to a point."""

    def __init__(
        self, make_scheduler, *, each_step, point=None, occurrence=0, ends_epochs=False, commits="bottom", **options
    ):
        """``commits``: at the "top" or the "bottom" of the loop, or at the bottom of each "second" step only."""
        self.board = Board(1)
        self.context = ElasticContext(alone(), SumOfThreads(0, self.board), BatchPolicy(20, None, 10), seed=0)
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loader = ElasticDataLoader(self.context, make_data())
        self.scheduler = make_scheduler(self.optimizer)
        values = {"scheduler": self.scheduler, "seen": 0}
        self.state = TorchState(self.context, self.model, self.optimizer, self.loader, values, **options)
        break_alone(self.state, self.board)
        core = self.context.session.core
        let_break(core)
        core.synced(self.state.progress)
        self.each_step, self.ends_epochs, self.commits = each_step, ends_epochs, commits
        self.point, self.occurrence = point, occurrence
        self.settings = {}  # by step: with what it was made
        self.broke = False

    def reach(self, point):
        if point == self.point:
            self.occurrence -= 1
            self.board.fail = self.board.fail or (self.occurrence < 0 and not self.broke)

    def collective(self, work):
        try:
            work()
        except WorldBroken:
            self.board.fail, self.broke = False, True
            raise

    def schedule(self):
        on_plateau = isinstance(self.scheduler, schedulers.ReduceLROnPlateau)
        self.scheduler.step(*([1.0] if on_plateau else []))
        self.reach("after scheduler")

    def accumulate(self, batch):
        for inputs, labels in batch:
            batch.backward(cross_entropy(self.model(inputs), labels))

    def make_step(self, batch):
        if self.commits == "top":
            self.state.commit()
        self.reach("before step")
        group = self.optimizer.param_groups[0]
        self.settings[batch.plan.step] = (float(group["lr"]), float(group["momentum"]))
        self.collective(lambda: self.accumulate(batch))
        self.optimizer.step()
        self.reach("after step")
        self.state.seen += batch.plan.batch
        if self.each_step:
            self.schedule()
        if self.commits == "bottom" or (self.commits == "second" and batch.plan.step % 2 == 0):
            self.state.commit()
        self.reach("after commit")

    def train(self):
        for _ in self.loader.epochs(EPOCHS):
            for batch in self.loader:
                self.make_step(batch)
            self.reach("end of epoch")
            self.collective(lambda: self.context.collective.sum_([torch.ones(1)], "evaluation"))
            self.reach("after evaluation")
            if not self.each_step:
                self.schedule()
            if self.ends_epochs:
                self.state.commit()

    def run(self):
        self.context.run(self.train, self.state)
        return self

    @property
    def result(self):
        group = self.optimizer.param_groups[0]
        weights = [parameter.tolist() for parameter in self.model.parameters()]
        return self.settings, float(group["lr"]), self.state.seen, self.state.progress, weights


def require_as_undisturbed(name, expected=None, **options):
    expected = expected or Training(SCHEDULERS[name], **options).run().result
    assert len({rate for rate, _ in expected[0].values()}) > 1
    for point, occurrence in [(None, 0), *POINTS]:
        disturbed = Training(SCHEDULERS[name], point=point, occurrence=occurrence, **options).run()
        assert disturbed.result == expected, (point, occurrence)


@pytest.mark.parametrize("each_step", [False, True], ids=["each epoch", "each step"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_is_that_of_an_undisturbed_run_wherever_the_world_breaks(name, each_step, caplog):
    require_as_undisturbed(name, each_step=each_step)
    assert "scheduler" not in caplog.text, "it is in its place"


@pytest.mark.parametrize("options", [{"commits": "top"}, {"commits": "second"}, {"ends_epochs": True}], ids=str)
@pytest.mark.parametrize("each_step", [False, True], ids=["each epoch", "each step"])
def test_so_it_is_with_commits_elsewhere_or_not_after_each_step(each_step, options):
    expected = Training(SCHEDULERS["StepLR"], each_step=each_step).run().result
    require_as_undisturbed("StepLR", expected, each_step=each_step, **options)


def by_epochs(**options):
    return Training(SCHEDULERS["StepLR"], each_step=False, **options)


def test_a_rate_that_is_a_tensor_stays_the_tensor_it_was():
    training = by_epochs()
    group = training.optimizer.param_groups[0]
    rate = group["lr"] = torch.tensor(0.1)
    training.state.commit()
    rate.fill_(0.5)
    lose_world(training.context)
    assert group["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


def test_a_schedule_that_is_not_held_is_warned_of(caplog):
    training = by_epochs()
    del training.state.values["scheduler"]
    training.context.run(lambda: None, training.state)
    assert "give it along, as in TorchState(scheduler=scheduler)" in caplog.text


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (lambda batch, steps, training: list(batch), r"step 1 are loaded once.*keep what is needed again in a list"),
        (lambda batch, steps, training: "labels" in [type(each) for each in batch], "loaded once"),
        (lambda batch, steps, training: next(steps), r"the batch of step 1 is over.*before the next is fetched"),
        (lambda batch, steps, training: lose_world(training.context), "the workers have changed"),
        (lambda batch, steps, training: (next(steps), batch.backward(torch.ones(()))), "is over"),
    ],
    ids=["gone through", "searched", "followed by a later one", "in a later world", "weighed later on"],
)
def test_a_batch_that_is_not_the_present_one_can_not_be_used(before, words):
    training = by_epochs()
    batch = next(steps := iter(training.loader))

    def use():
        before(batch, steps, training)
        list(batch)

    refused(words, use)


def test_a_batch_that_was_not_used_up_leaves_the_samples_of_the_next_alone():
    training = by_epochs()
    expected = [[inputs.tolist() for inputs, _ in batch] for batch in training.loader]
    for number, batch in enumerate(training.loader):
        if number == 0:
            next(iter(batch))
        else:
            assert [inputs.tolist() for inputs, _ in batch] == expected[number]
