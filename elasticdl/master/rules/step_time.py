"""How fast a job is with N workers compared with one, as its measured steps tell.

    T(N) = (T_comp^g + T_net^g)^(1/g)      T_comp = a + b * share(N)      T_net = a_n + b_n * (N - 2), 0 for N = 1

is the time of a step. ``share`` is the largest part of the global batch that one worker has, in samples; g in [1, 10] says
how far computation and reduction overlap. The form is that of Pollux (Qiao et al., OSDI 2021), whose code is AdaptDL's
`goodput.py`. Gradient accumulation has no term of its own here: a worker's micro-batches of one step are part of ``share``.

AdaptDL takes the one likeliest set of parameters. Here it is their whole distribution, since how sure the answer is matters as
much as the answer: weak priors over what is common, and the measured steps. It is drawn from by sequential Monte Carlo with
tempering (Del Moral, Doucet and Jasra 2006), which also finds its way where parameters can hardly be told apart, as with few
numbers of workers seen. What the form misses is a further term for each number of workers, of a size that is a parameter,
too; so a number that was measured is believed as measured, whatever the form says.

All times are logarithms. The seconds of one worker alone are a factor on every T(N), so that one parameter is integrated
over by formula; the others are `_PRIOR`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elasticdl.master.state.speedup import Curve, Observation, Point

Array = NDArray[np.float64]

# Mean and standard deviation of: logit a/T_comp(1), log a_n/T_comp(1), log b_n/a_n, logit (g - 1)/9, log of what the form
# misses. With these, 80 % of jobs have a/T_comp(1) in 1-35 %, a_n/T_comp(1) in 1-70 %, b_n/a_n in 1-60 %, g in 1.2-5.
_PRIOR = np.array([(-2.5, 1.5), (-2.5, 1.7), (-2.8, 1.8), (-2.1, 1.5), (math.log(0.02), 0.7)])
_SERIAL, _NETWORK, _GROWTH, _OVERLAP, _MISSED = range(len(_PRIOR))
# What the mean of all members' computing misses of T_comp, and how a job's speed wanders in an hour: parts of a step's time.
BUSY_MISFIT = 0.05
WANDERING = 0.03
# However alike the steps of a world are, as few steps are by chance, those of the next are not like them by more than this.
LEAST_SPREAD = 0.01
# Steps next to each other are alike: so many tell as much as one by itself.
STEPS_OF_ONE = 4
DRAWS = 600
MOVES = 3  # of each draw at each temperature
LOW, MIDDLE, HIGH = 0.1, 0.5, 0.9
# There is a point for every number of workers up to this, and above it for each that is this much more than the last.
CONTIGUOUS, SPARSENESS = 32, 1.08


@dataclass(frozen=True, slots=True)
class Batches:
    """The samples of a step with N workers."""

    samples: float  # of the global batch; of one worker's if it ``follows``
    follows: bool  # the global batch follows the number of workers

    @classmethod
    def of(cls, observations: Sequence[Observation], *, follows: bool) -> Batches:
        """``follows``: what is assumed as long as only one number of workers was seen."""
        sizes = {each.workers: each.samples for each in observations}
        fewest, most = min(sizes), max(sizes)
        if fewest < most:
            growth = math.log(sizes[most] / sizes[fewest]) / math.log(most / fewest)
            follows = growth > 0.5
        return cls(sizes[most] / most if follows else sizes[most], follows)

    def step(self, workers: Array) -> Array:
        return self.samples * workers if self.follows else np.full_like(workers, self.samples)

    def share(self, workers: Array) -> Array:
        """The largest share, of that which one worker alone would have."""
        return np.ones_like(workers) if self.follows else np.ceil(self.samples / workers) / self.samples


@dataclass(frozen=True, slots=True)
class _Measured:
    """The observations as arrays."""

    workers: Array
    share: Array
    time: Array  # log seconds
    variance: Array  # of the measurement
    busy: Array  # log seconds; 0 where not known
    busy_trust: Array  # 1 / variance; 0 where not known

    @classmethod
    def of(cls, observations: Sequence[Observation], batches: Batches) -> _Measured:
        workers = np.array([float(each.workers) for each in observations])
        error = np.array(
            [max(each.spread, LEAST_SPREAD) ** 2 * STEPS_OF_ONE / max(each.steps, 1) for each in observations]
        )
        error += WANDERING**2 * np.array([each.age / 3600 for each in observations]) + 1e-6
        known = np.array([each.busy > 0 for each in observations])
        return cls(
            workers,
            batches.share(workers),
            np.log([each.seconds for each in observations]),
            error,
            np.log([each.busy or 1.0 for each in observations]),
            known / (error + BUSY_MISFIT**2),
        )


def fit(observations: Sequence[Observation], *, follows: bool, most: int = 0) -> Curve:
    """What is to be believed of the speedup, up to twice as many workers as were seen, or up to ``most``.

    ``follows``: whether the global batch follows the number of workers, if the observations do not tell.
    """
    if not observations:
        return Curve()
    draw = np.random.default_rng(0)
    batches = Batches.of(observations, follows=follows)
    measured = _Measured.of(observations, batches)
    parameters = _posterior(measured, draw)
    seen = {each.workers for each in observations}
    # Also of large numbers there is a point for those that were seen, and for one more.
    wanted = sorted({*_numbers(max(8, 2 * max(seen), most)), *seen, *(n + 1 for n in seen)})
    asked = np.array(sorted({1, *wanted, *(n - 1 for n in wanted if n > 1)}), dtype=float)
    noise = _noise(observations) if batches.follows else 0.0
    rate = np.log(batches.step(asked)) + _log_statistical_efficiency(batches.step(asked), noise)
    rate = rate - _predicted(asked, parameters, measured, batches, draw)
    speedup = np.exp(np.clip(rate - rate[:, :1], -50, 50))  # what a checkpoint tells may be absurd
    return Curve(_points(asked, speedup, wanted), noise)


# ---- the form: each row is a set of parameters, each column a number of workers ----


def _log_computing(parameters: Array, share: Array) -> Array:
    """Relative to the computing of one worker."""
    serial = _logistic(parameters[:, [_SERIAL]])
    return np.asarray(np.log(serial + (1 - serial) * share))


def _log_time(parameters: Array, workers: Array, share: Array) -> Array:
    """Relative to the computing of one worker."""
    overlap = 1 + 9 * _logistic(parameters[:, [_OVERLAP]])
    computing = _log_computing(parameters, share)
    growth = np.exp(np.clip(parameters[:, [_GROWTH]], -30, 30))
    network = parameters[:, [_NETWORK]] + np.log1p(growth * np.maximum(workers - 2, 0))
    together = np.logaddexp(overlap * computing, overlap * network) / overlap
    return np.asarray(np.where(workers > 1, together, computing))


def _log_unit(parameters: Array, measured: _Measured) -> tuple[Array, Array, Array]:
    """The log seconds of one worker's computing, given all else: its mean and precision, and how likely the rest then is."""
    variance = measured.variance + np.exp(2 * parameters[:, [_MISSED]])
    time = measured.time - _log_time(parameters, measured.workers, measured.share)
    busy = measured.busy - _log_computing(parameters, measured.share)
    trust = np.concatenate([1 / variance, np.broadcast_to(measured.busy_trust, busy.shape)], axis=1)
    residual = np.concatenate([time, busy], axis=1)
    precision = trust.sum(1)
    mean = (trust * residual).sum(1) / precision
    spread = (trust * (residual - mean[:, None]) ** 2).sum(1)
    return mean, precision, -0.5 * (spread + np.log(variance).sum(1) + np.log(precision))


# ---- its parameters ----


def _posterior(measured: _Measured, draw: np.random.Generator) -> Array:
    """Equally likely sets of parameters."""
    mean, deviation = _PRIOR.T
    parameters = mean + deviation * draw.standard_normal((DRAWS, len(_PRIOR)))
    likelihood = _log_unit(parameters, measured)[2]
    heat = 0.0  # the power of the likelihood that counts: from the prior to the posterior
    while heat < 1:
        rise = 1 - heat
        while (weights := np.exp(rise * (likelihood - likelihood.max()))).sum() ** 2 < DRAWS / 2 * (weights**2).sum():
            rise *= 0.7  # half of the draws are still to count
        heat = min(1.0, heat + rise)
        shares = np.cumsum(weights) / weights.sum()
        chosen = np.searchsorted(shares, (draw.random() + np.arange(DRAWS)) / DRAWS).clip(max=DRAWS - 1)
        parameters, likelihood = parameters[chosen], likelihood[chosen]
        root = np.linalg.cholesky(np.cov(parameters.T) + 1e-9 * np.eye(len(_PRIOR)))
        for _ in range(MOVES * (2 if heat == 1 else 1)):
            moved = parameters + 2.38 / math.sqrt(len(_PRIOR)) * draw.standard_normal(parameters.shape) @ root.T
            found = _log_unit(moved, measured)[2]
            prior = (((parameters - mean) / deviation) ** 2 - ((moved - mean) / deviation) ** 2).sum(1) / 2
            taken = np.log(draw.random(DRAWS)) < heat * (found - likelihood) + prior
            parameters, likelihood = np.where(taken[:, None], moved, parameters), np.where(taken, found, likelihood)
    return np.asarray(parameters)


# ---- what follows ----


def _predicted(
    workers: Array, parameters: Array, measured: _Measured, batches: Batches, draw: np.random.Generator
) -> Array:
    """Log seconds of a step for each set of parameters and each number of workers, with what the form misses."""
    mean, precision, _ = _log_unit(parameters, measured)
    unit = (mean + draw.standard_normal(mean.shape) / np.sqrt(precision))[:, None]
    form = unit + _log_time(parameters, workers, batches.share(workers))
    missed = np.exp(parameters[:, [_MISSED]])
    beyond = missed * draw.standard_normal(form.shape)
    residual = measured.time - unit - _log_time(parameters, measured.workers, measured.share)
    for column, seen in enumerate(measured.workers):
        error = measured.variance[column]
        trust = missed**2 / (missed**2 + error)
        at = np.flatnonzero(workers == seen)
        beyond[:, at] = trust * residual[:, [column]] + np.sqrt(trust * error) / missed * beyond[:, at]
    return np.asarray(form + beyond)


def _noise(observations: Sequence[Observation]) -> float:
    """Gradient noise scale: that of the newest steps that tell."""
    told = [each for each in observations if each.noise > 0]
    return min(told, key=lambda each: each.age).noise if told else 0.0


def _log_statistical_efficiency(samples: Array, noise: float) -> Array:
    """Of a sample in a batch of so many: (phi + M0)/(phi + M), without the constant part (Pollux, equation 6)."""
    return np.asarray(-np.log(noise + samples) if noise > 0 else np.zeros_like(samples))


def _numbers(most: int) -> list[int]:
    """Of workers, for which there is a point."""
    numbers = list(range(1, min(most, CONTIGUOUS) + 1))
    while numbers[-1] < most:
        numbers.append(min(most, math.ceil(numbers[-1] * SPARSENESS)))
    return numbers


def _points(asked: Array, speedup: Array, wanted: Sequence[int]) -> tuple[Point, ...]:
    column = {int(workers): index for index, workers in enumerate(asked)}
    here, less = [column[n] for n in wanted[1:]], [column[n - 1] for n in wanted[1:]]
    levels = np.quantile(speedup[:, here], (LOW, MIDDLE, HIGH), axis=0).T.tolist()
    gains = np.quantile(speedup[:, here] - speedup[:, less], (LOW, MIDDLE, HIGH), axis=0).T.tolist()
    out = [Point(1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)]
    for workers, (low, middle, high), (least, gain, largest) in zip(wanted[1:], levels, gains, strict=True):
        out.append(Point(workers, middle, low, high, gain, least, largest))
    return tuple(out)


def _logistic(of: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(of, -30, 30))))
