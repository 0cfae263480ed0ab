"""What the scripts of all workers ask each other has one answer for all, whoever is lost meanwhile."""

from types import SimpleNamespace

import pytest
import torch
from plain_kit import BATCHES, TORN, Script, compare, run
from session_kit import JobStub

from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.reporting import Activity
from elasticdl.elastic.torch_kit.agreements import Agreements, Answers


class Late(Script):
    """Worker 1 is lost when a mean is known, which has not reached the workers ``late``: for them the world has broken before."""

    late = ()

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = [0.0] * BATCHES

    def begun(self):
        collective = self.job.contexts[self.worker].collective
        real = collective.sum_asked

        def sum_asked(tensor, what):
            real(tensor, what)
            if self.worker in self.late and self.made == TORN and 1 in self.job.living:
                raise WorldBroken("a worker is lost")

        collective.sum_asked = sum_asked

    def lose(self):
        """Not before it is asked."""

    def told(self, loss):
        told = self.mean(loss)
        super().lose()
        self.seen[self.made] = round(float(told), 3)


def before_backward(script):
    for x, y in script.loader:
        loss = script.loss(x, y)
        script.told(loss)
        loss.backward()
        script.step()


def clipped(script):
    """The loss is known, as the gradients are summed."""
    for x, y in script.loader:
        loss = script.loss(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(script.model.parameters(), 0.5)
        script.told(loss)
        script.step()


@pytest.mark.parametrize("late", [(), (0,), (2,), (0, 2)])
@pytest.mark.parametrize("loop", [before_backward, clipped])
def test_a_mean_before_the_step_is_that_of_the_global_batch_whoever_has_heard_it(loop, late):
    assert len(compare(loop, 3, loses=True, kind=type("Kind", (Late,), {"late": late}))) == 2


def test_a_mean_between_two_steps_that_a_worker_was_lost_in_is_warned_of_once_a_worker():
    def loop(script):
        for x, y in script.loader:
            script.loss(x, y).backward()
            script.step()
            script.mean(script.loss(x, y).detach())

    left, _ = run(loop, 3, loses=True)
    first, other = (each.found[0] for each in left)
    torch.testing.assert_close(first, other, rtol=0, atol=0)
    said = f"an elastic.mean() after step {TORN} is each worker's own: a worker is lost"
    assert left[0].job.warnings == [said] * 2


class Others:
    """A collective of two workers: rank 0 says what this one would, or the other is lost."""

    def __init__(self):
        self.asked, self.is_lost = 0, False

    def broadcast_bytes(self, value, name):
        self.asked += 1
        if self.is_lost:
            raise WorldBroken("a worker is lost")
        return value


def asking(**values):
    """With open batches what workers say is part of the step; see `Agreements.ask`."""
    told = {name: [] for name in ("advance", "warn")}
    calls = {name: each.append for name, each in told.items()}
    job = JobStub(size=2, world=SimpleNamespace(version=3), collective=Others(), is_told_to_leave=False, **calls)
    state = SimpleNamespace(reducer=SimpleNamespace(begin_launched=lambda: None))
    of_nothing = {"open_batches": [], "is_catching_up": False, "is_reduced": False, "is_torn": False}
    answers = Answers()
    return Agreements(SimpleNamespace(**{"job": job, "state": state, **of_nothing, **values}), answers), answers, told


def test_who_comes_in_the_middle_of_a_torn_step_does_not_ask_what_the_others_have_decided():
    """They wait for its gradients, and not for another decision."""
    agreements, answers, told = asking(open_batches=["a batch"])
    for known in ("first", None):
        answers.add(known)
    collective = agreements.asking.job.collective
    assert [agreements.of_first(number, "a decision") for number in range(3)] == ["first", None, 2]
    assert collective.asked == 1
    agreements.asking.open_batches.clear()
    agreements.of_first("between two steps", "a decision")
    assert collective.asked == 2
    assert told["advance"] == [Activity.WAIT, Activity.UPDATE] * 2  # who goes on to write a checkpoint does not wait


def test_a_world_that_breaks_while_something_is_said_is_warned_of_once():
    agreements, _, told = asking()
    agreements.asking.job.collective.is_lost = True
    assert [agreements.of_first(number, "a decision") for number in range(3)] == [0, 1, 2]
    assert told["warn"] == ["a decision is each worker's own: a worker is lost"]
    agreements.asking.job.world.version = 4
    agreements.of_first(0, "a decision")
    assert len(told["warn"]) == 2
