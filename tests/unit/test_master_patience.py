"""Ten hours of ordinary steps, in virtual time: nobody is taken to be stuck who is not, and who is, is named soon."""

import random
from pathlib import Path

import pytest
from play_kit import Play

from elasticdl.job import messages as m
from elasticdl.master.core.rule import GIVE_UP, NAME_FACTOR, NAME_FLOOR

# Seconds of 4,000 steps in a row of one worker, on two cores that other programs kept busy.
MEASURED = Path(__file__).with_name("measured_step_seconds.txt")
BEAT = 0.5
LONGEST_BURST = 8.0


class Training:
    """What the workers of one job do, one step after another; each waits for the slowest."""

    def __init__(self, seed, scale, workers=3, steps_per_epoch=500, validation=0.0, checkpoint=0.0, compile=0.0):
        """``scale``: of the measured steps. ``validation``: seconds at the end of an epoch in which nothing is told."""
        self.draw = random.Random(seed)
        self.steps = [float(line) * scale for line in MEASURED.read_text().split()]
        self.workers, self.steps_per_epoch = workers, steps_per_epoch
        self.validation, self.checkpoint, self.stuck = validation, checkpoint, None
        self.step = self.epoch = 0
        self.begin(compile)

    def begin(self, at):
        """A step, which takes longer now and then: by somebody else's load, a disk's or a network's, with a heavy tail."""
        late = [self._burst() if self.draw.random() < 1e-3 else 0.0 for _ in range(self.workers)]
        self.ready = [at + self.draw.choice(self.steps) + more for more in late]  # when each comes to the collective

    def _burst(self):
        return min(LONGEST_BURST, 0.5 * self.draw.paretovariate(1.2))

    def advance(self, until):
        """Everything that happens till then; who waits."""
        while all(here := [at <= until and n != self.stuck for n, at in enumerate(self.ready)]):
            self.step += 1
            now, self.told_epoch = max(self.ready), self.epoch
            if self.step % 100 == 0:
                now += self.checkpoint * self.draw.lognormvariate(0.0, 0.5)
            if self.step % self.steps_per_epoch == 0:
                self.epoch += 1
                now += self.validation * self.draw.lognormvariate(0.0, 0.25)
            self.begin(now)
        return here


class LongRun(Play):
    def __init__(self, training):
        super().__init__(1, training.workers)
        self.training, self.reported, self.alarms = training, 0, []
        self.do(f"0-{training.workers - 1} train")

    def live(self, seconds):
        training, end = self.training, self.now + seconds
        while self.now < end:
            self.now += BEAT
            for worker, waits in enumerate(training.advance(self.now)):
                self.say(worker, m.Heartbeat(1, training.step, 2 * training.step + waits, waits))
            if training.step > self.reported:
                self.reported = training.step
                told = (training.step, training.told_epoch, 0.5, 32, 0.1, 0.1, 1, 32 * training.step, False)
                self.say(0, m.Progress((m.StepReport(*told),), 0, 0))
            self.alarms += [(self.now, alarm) for alarm in self.do("tick")]


JOBS = {
    "steps of 100 ms": {"scale": 3.0, "steps_per_epoch": 2000, "workers": 2},
    "steps of 1 s, checkpoints": {"scale": 30.0, "steps_per_epoch": 300, "checkpoint": 15.0},
    "a validation loop of the user's own": {"scale": 4.0, "steps_per_epoch": 1000, "validation": 40.0},
    "slow to compile, long epochs": {"scale": 20.0, "steps_per_epoch": 6000, "compile": 100.0, "checkpoint": 4.0},
    "all of that, and steps of 6 s": {"scale": 200.0, "steps_per_epoch": 100, "validation": 50.0, "checkpoint": 20.0},
}


def without_alarm(kind, hours, seed):
    run = LongRun(Training(seed, **JOBS[kind]))
    run.live(hours * 3600.0)
    assert run.alarms == run.records("worker_stuck") == run.records("warning") == []
    return run


@pytest.mark.slow
@pytest.mark.parametrize("kind", JOBS)
def test_ten_hours_of_ordinary_steps_give_no_alarm(kind):
    assert without_alarm(kind, hours=10, seed=1).training.step > 1000


@pytest.mark.parametrize("kind", JOBS)
def test_who_hangs_after_an_hour_without_alarm_is_asked_at_the_learnt_limit(kind):
    run = without_alarm(kind, hours=1, seed=3)
    limit = max(NAME_FLOOR, NAME_FACTOR * run.job.progress_limits.longest)
    run.training.stuck = 1
    began = run.now
    run.live(GIVE_UP)
    at, asked = run.alarms[0]
    assert asked == "dump 1"
    assert at - began <= min(limit, GIVE_UP) + max(run.training.steps) + 2 * BEAT
