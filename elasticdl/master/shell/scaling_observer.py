"""Measures a job's steps, and has a thread find out how the job scales.

The thread fits the curve, as that would block the master's event loop. The thread also imports numpy, which takes long; a job
that is over within FIRST_SECONDS never does. The result goes to the core as an event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from elasticdl.common.backoff import Backoff
from elasticdl.common.extras import how_to_install
from elasticdl.job.spec import JobSpec, WorkerRange
from elasticdl.master.rules.measured_steps import MeasuredSteps
from elasticdl.master.shell.observer import Observer
from elasticdl.master.state.events import ScalingLearnt
from elasticdl.master.state.learnt import Forgotten, Learnt
from elasticdl.master.state.speedup import Observation
from elasticdl.master.state.values import Pace, StepReport

# After a world has formed, the curve is fitted again after so long at first, and then after twice as long each time.
FIRST_SECONDS, LONGEST_SECONDS = 4.0, 60.0
# For a fit that is under way when the job ends.
CLOSE_SECONDS = 2.0
_log = logging.getLogger(__name__)


class ScalingObserver(Observer):
    def __init__(
        self,
        spec: JobSpec,
        limits: Callable[[], WorkerRange],
        past: Learnt,
        post: Callable[[ScalingLearnt], None],
        clock: Callable[[], float],
    ) -> None:
        """``post`` is called in a thread of this observer's. ``limits``: the job's, as they are now. ``past``: what an earlier
        master has learnt."""
        self._spec = spec
        self._limits = limits
        self._post = post
        self._clock = clock
        self._steps = MeasuredSteps()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scaling")
        self._fit: Future[None] | None = None  # under way, or the last
        self._backoff, self._due = Backoff(first=FIRST_SECONDS, longest=LONGEST_SECONDS), 0.0
        self._failed = False
        self.recalled(past)

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        if event in ("world_formed", "master_restarted") and fields["world"]:
            self._steps.enter(fields["world"], len(fields["members"]))
            self._backoff.reset()
            self._due = self._clock() + FIRST_SECONDS
        elif event == "scale_requested":  # whoever asked for it watches what comes of it
            self._backoff.reset()
            self._due = self._clock()

    def trained(self, steps: Sequence[StepReport], pace: Pace) -> None:
        now = self._clock()
        for step in steps:
            self._steps.take(step, pace.busy, now)
        idle = self._fit is None or self._fit.done()
        if now < self._due or not idle or self._failed or not self._steps.enough:
            return
        observations = self._steps.observations(now)
        if self._spec.scale_policy == "all" and max(each.workers for each in observations) == 1:
            return  # steps of one worker say nothing of more workers, and no policy needs a curve
        self._due = now + self._backoff.delay()
        known = (self._steps.workers, observations, self._steps.forgotten, self._steps.dropped)
        self._fit = self._thread.submit(self._learn, *known)

    def recalled(self, learnt: Learnt) -> None:
        kept = [each for each in learnt.observations if self._has_this_batch(each)]
        if learnt.observations and not kept:
            self._steps.dropped = True
        else:
            self._steps.recall(kept, self._clock(), learnt.forgotten)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._fit is not None:
            wait([self._fit], CLOSE_SECONDS)

    def _learn(
        self, workers: int, observations: tuple[Observation, ...], forgotten: tuple[Forgotten, ...], dropped: bool
    ) -> None:
        try:
            from elasticdl.master.rules.step_time import fit  # imports numpy

            most = min(self._limits().maximum, 2 * workers)
            curve = fit(observations, follows=self._follows, most=most)
        except ModuleNotFoundError as error:
            self._failed = True
            _log.warning("how the job scales is not looked at: %s; %s", error, how_to_install("worker"))
            return
        except Exception:  # noqa: BLE001 - a mistake there must not end the job
            self._failed = True
            _log.exception("how the job scales is not looked at any more")
            return
        self._post(ScalingLearnt(workers, observations, curve, forgotten, dropped))

    @property
    def _follows(self) -> bool:
        """Whether the global batch follows the number of workers. Of a user's own program that is not known."""
        return not self._spec.command and self._spec.global_batch_size is None

    def _has_this_batch(self, observation: Observation) -> bool:
        """Whether it was measured with the batch that the job has now: else it says nothing."""
        each = self._spec.minibatch_size
        now = self._spec.global_batch_size or (each and each * observation.workers)
        return not now or observation.samples == now
