"""What the scripts of all workers ask each other has one answer for all, whoever is lost meanwhile."""

import pytest
import torch
from loop_benches import BATCHES, TORN, PlainScript, compare, run

from elasticdl.elastic.core.protocol import WorldBroken


class Losing(PlainScript):
    def be_lost(self):
        if self.worker == 1 and self.made == TORN:
            self.job.lose()


class Late(Losing):
    """Worker 1 is lost when a mean is known, which has not reached the workers ``late``: for them the world has broken before."""

    late, has_missed = (), False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = [0.0] * BATCHES

    def begun(self):
        collective = self.job.contexts[self.worker].collective
        real = collective.sum_asked

        def sum_asked(tensor, what):
            real(tensor, what)
            if self.worker in self.late and self.made == TORN and not self.has_missed:
                self.has_missed = True
                raise WorldBroken("a worker is lost")

        collective.sum_asked = sum_asked

    def told(self, loss):
        told = self.mean(loss)
        self.be_lost()
        number = self.made if self.elastic is None else self.host._last.batch.number
        self.seen[number] = round(float(told), 3)


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
    assert len(compare(loop, 3, kind=type("Kind", (Late,), {"late": late}))) == 2


def test_a_mean_between_two_steps_that_a_worker_was_lost_in_is_warned_of_once_a_worker():
    def loop(script):
        for x, y in script.loader:
            script.loss(x, y).backward()
            script.step()
            script.be_lost()
            script.mean(script.loss(x, y).detach())

    left, _ = run(loop, 3, kind=Losing)
    first, other = (each.found[0] for each in left)
    torch.testing.assert_close(first, other, rtol=0, atol=0)
    said = f"an elastic.mean() after step {TORN} is each worker's own: a worker is lost"
    assert left[0].job.warnings == [said] * 2
