"""A library loop's weights, learning rate, schedule and values go back together, wherever in an epoch the world breaks."""

import pytest
import torch
from front_ends import STEPS, Script
from job_kit import Job
from loop_benches import LibraryLoop
from refusal_kit import require_refusal
from session_kit import lose_world
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler as schedulers

from elasticdl.elastic.core.protocol import WorldBroken

LAST = 2 * STEPS
SCHEDULERS = {
    "steps": lambda optimizer: schedulers.StepLR(optimizer, 1, gamma=0.5),
    "cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, total_steps=20),
    "plateau": lambda optimizer: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0),
}


class Scheduled(LibraryLoop):
    """``each_step``: else the scheduler goes on behind each epoch. ``commits``: at the "top" or the "bottom" of the loop, at the bottom of each "second" step, or behind "epochs", too."""

    def __init__(self, make, each_step, commits="bottom", breaks_in=None):
        super().__init__(Script())
        self.scheduler, self.each_step, self.commits, self.breaks_in = (
            make(self.optimizer),
            each_step,
            commits,
            breaks_in,
        )
        self.values = {"scheduler": self.scheduler, "seen": 0}
        self.settings = {}  # by step: with what it was made

    def make_epochs(self, loader):
        for epoch in loader.epochs(2):
            for batch in loader:
                self.make_step(batch)
            if self.breaks_in == epoch:  # as an evaluation would
                self.breaks_in = None
                raise WorldBroken("a worker is lost")
            if not self.each_step:
                self.schedule()
            if self.commits == "epochs":
                self.state.commit()

    def make_step(self, batch):
        if self.commits == "top":
            self.state.commit()
        group, step = self.optimizer.param_groups[0], batch.plan.step
        self.settings[step] = (float(group["lr"]), float(group["momentum"]))
        for x, y in batch:
            batch.backward(cross_entropy(self.model(x), y))
        self.optimizer.step()
        self.state.seen += batch.plan.batch
        if self.each_step:
            self.schedule()
        if self.commits in ("bottom", "epochs") or (self.commits == "second" and step % 2 == 0):
            self.state.commit()

    def schedule(self):
        self.scheduler.step(*([1.0] if isinstance(self.scheduler, schedulers.ReduceLROnPlateau) else []))


def result_of(script, torn=()):
    job = Job(1, {(0, step): "torn" for step in torn})
    job.keeps_states = False
    assert job.run(lambda _: script.train(job))[0] == (None,)
    weights = [each.tolist() for each in script.model.parameters()]
    return script.settings, script.optimizer.param_groups[0]["lr"], script.state.seen, script.state.progress, weights


@pytest.mark.parametrize("commits", ["bottom", "top", "second", "epochs"])
@pytest.mark.parametrize(
    ("name", "each_step"), [("steps", False), ("steps", True), ("cycle", True), ("plateau", False)]
)
def test_a_schedule_is_that_of_an_undisturbed_run_wherever_the_world_breaks(name, each_step, commits):
    expected = result_of(Scheduled(SCHEDULERS[name], each_step))
    assert len({rate for rate, _ in expected[0].values()}) > 1
    for torn in range(1, LAST + 1):
        assert result_of(Scheduled(SCHEDULERS[name], each_step, commits), [torn]) == expected, f"in step {torn}"
    for epoch in range(2):
        assert result_of(Scheduled(SCHEDULERS[name], each_step, commits, epoch)) == expected, f"behind epoch {epoch}"


def test_a_schedule_that_is_not_held_is_warned_of():
    script, job = Scheduled(SCHEDULERS["steps"], each_step=True), Job(1)
    script.values = {"seen": 0}
    job.run(lambda _: script.train(job))
    (line,) = job.warnings
    assert "give it along, as in TorchState(scheduler=scheduler)" in line


class Uses(LibraryLoop):
    """``use``: the first batch, in another way than a loop over it."""

    def make_epochs(self, loader):
        batch = next(steps := iter(loader))
        self.use(batch, steps)
        list(batch)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda job, batch, steps: list(batch), r"step 1 are loaded once.*keep what is needed again in a list"),
        (lambda job, batch, steps: "labels" in [type(each) for each in batch], "loaded once"),
        (lambda job, batch, steps: next(steps), r"the batch of step 1 is over.*before the next is fetched"),
        (lambda job, batch, steps: lose_world(job.contexts[0]), "the workers have changed"),
        (lambda job, batch, steps: (next(steps), batch.backward(torch.ones(()))), "is over"),
    ],
    ids=["gone through", "searched", "followed by a later one", "in a later world", "weighed later on"],
)
def test_a_batch_that_is_not_the_present_one_can_not_be_used(use, words):
    script, job = Uses(Script()), Job(1)
    script.use = lambda *given: use(job, *given)
    ((error,), _) = job.run(lambda _: script.train(job))
    require_refusal(error, words)
