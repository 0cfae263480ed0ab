"""A job whose true speed is known: it makes steps in virtual time, and goes by the policy."""

from __future__ import annotations

import math

import numpy as np

from elasticdl.job.messages import StepReport
from elasticdl.job.spec import WorkerRange
from elasticdl.master.core.sizing import MeasuredSteps, Situation, SpeedupCurve, WorkerTarget


class Truth:
    """Seconds of a step with n workers, in the form of the model. ``serial``, ``network``: parts of one worker's computing."""

    def __init__(self, *, samples=256, seconds=0.5, serial=0.02, network=0.05, growth=0.1, overlap=2.0, follows=False):
        self.samples, self.seconds, self.follows = samples, seconds, follows
        self.serial, self.network, self.growth, self.overlap = serial, network, growth, overlap

    def computing(self, n):
        share = 1.0 if self.follows else math.ceil(self.samples / n) / self.samples
        return self.seconds * (self.serial + (1 - self.serial) * share)

    def step(self, n):
        network = 0.0 if n == 1 else self.seconds * self.network * (1 + self.growth * (n - 2))
        return (self.computing(n) ** self.overlap + network**self.overlap) ** (1 / self.overlap)

    def batch(self, n):
        return self.samples * n if self.follows else self.samples

    def speedup(self, n):
        return self.batch(n) / self.step(n) / (self.batch(1) / self.step(1))

    @classmethod
    def draw(cls, draw):
        return cls(
            samples=int(draw.choice([32, 64, 100, 256, 1024])),
            seconds=10 ** draw.uniform(-2, 1),
            serial=draw.beta(1, 8),
            network=10 ** draw.uniform(-2.5, 0),
            growth=10 ** draw.uniform(-2.5, 0),
            overlap=draw.uniform(1, 5),
            follows=draw.random() < 0.3,
        )


def report(seconds, *, world=1, samples=64, step=1, ends_epoch=False):
    return StepReport(step, 0, 0.5, samples, 0.1, seconds, world, samples, ends_epoch)


class VirtualJob:
    """With the policy on. ``noise``: standard deviation of the logarithm of a step's seconds; ``wander``: of the whole
    job's speed, for an hour."""

    def __init__(self, truth, limits, least, *, seed=0, noise=0.1, wander=0.0, pause=1.0):
        self.truth, self.least, self.noise, self.wander, self.pause = truth, least, noise, wander, pause
        self.limits = WorkerRange(minimum=limits[0], maximum=limits[1])
        self.draw = np.random.default_rng(seed)
        self.now, self.drift, self.world = 0.0, 0.0, 1
        self.workers = limits[0]
        self.steps = MeasuredSteps()
        self.steps.enter(1, self.workers)
        self.policy = WorkerTarget(least, self.workers)
        self.moves = []  # when, to how many, and why

    def run(self, hours):
        interval = 4.0
        while self.now < hours * 3600:
            self.train(max(interval, 24 * self.truth.step(self.workers)))
            interval = min(2 * interval, 60.0)
            if self.decide():
                interval = 4.0
        return self

    def train(self, seconds):
        each = self.truth.step(self.workers)
        self.drift += self.wander * math.sqrt(seconds / 3600) * self.draw.standard_normal()
        lasted = np.exp(self.noise * self.draw.standard_normal(min(200, int(seconds / each))) + self.drift) * each
        self.now += seconds
        for one in lasted:
            self.steps.take(report(float(one), world=self.world, samples=self.truth.batch(self.workers)))

    def decide(self):
        """Whether the number of workers is another now."""
        curve = SpeedupCurve(self.steps.observations(self.now))
        situation = Situation(
            limits=self.limits,
            present=self.workers,
            measured=self.steps.enough,
            incomplete=False,
            time_left=-1.0,
            now=self.now,
        )
        self.policy.decide(curve, situation)
        if self.policy.target == self.workers:
            return False
        self.workers, self.world = self.policy.target, self.world + 1
        self.now += self.pause
        self.steps.enter(self.world, self.workers)
        self.moves.append((round(self.now), self.workers, self.policy.reason))
        return True

    def best(self):
        """The largest number of workers that truly pays."""
        numbers = range(self.limits.minimum, self.limits.maximum + 1)
        return max((n for n in numbers if self.truth.speedup(n) / n >= self.least), default=self.limits.minimum)
