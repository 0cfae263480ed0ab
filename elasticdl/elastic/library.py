"""The functions that a training script of one's own calls; each framework's package offers them under their names.

A process takes part in one job, as Horovod knows one world per process; so they speak of that one.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from elasticdl.common.errors import UserError
from elasticdl.elastic.batch_plan import BatchPolicy
from elasticdl.elastic.context import ContextT
from elasticdl.elastic.current import check_gpus, job
from elasticdl.elastic.errors import Stopped
from elasticdl.elastic.loop import Hooks
from elasticdl.elastic.state import TrainingState

log = logging.getLogger(__name__)

Result = TypeVar("Result")
StateT = TypeVar("StateT", bound=TrainingState)
ContextT_co = TypeVar("ContextT_co", covariant=True)


class Connect(Protocol[ContextT_co]):
    """As `elasticdl.elastic.torch.context.connect`."""

    def __call__(self, policy: BatchPolicy, *, seed: int, environ: Mapping[str, str]) -> ContextT_co: ...


class OwnJob(Generic[ContextT]):
    """The job that this process takes part in, once `init` has been called."""

    def __init__(
        self, connect: Connect[ContextT], seed_framework: Callable[[int], Any], count_gpus: Callable[[], int]
    ) -> None:
        self._connect = connect
        self._seed_framework = seed_framework
        self._count_gpus = count_gpus
        self._context: ContextT | None = None
        self.trained = False  # a training was begun

    def init(
        self,
        global_batch_size: int | None = None,
        max_gpu_batch_size: int | None = None,
        gpus: int | None = None,
        *,
        batch_size_per_worker: int | None = None,
        seed: int = 0,
    ) -> ContextT:
        """Join the job that this process was started for, or run alone; call it once, before building the optimizer.

        ``global_batch_size`` samples make one optimizer step whatever the number of workers, none of which runs more
        than ``max_gpu_batch_size`` at once. With ``batch_size_per_worker`` instead, the global batch grows with the
        workers. ``gpus`` is only looked at by a script that runs alone: on how many its own loop computes; else all.

        Raises:
            UserError: the numbers make no sense, Horovod is missing, or the environment is unusable.
        """
        if multiprocessing.parent_process() is not None:
            raise UserError(
                "elastic.init() was called in a process that multiprocessing started, as it imports the script anew: put "
                'what the script does below `if __name__ == "__main__":`'
            )
        job.require_none()
        check_gpus(gpus)
        try:
            policy = BatchPolicy(global_batch_size, batch_size_per_worker, max_gpu_batch_size)
        except ValueError as error:
            raise UserError(f"elastic.init: {error}") from error
        if global_batch_size and max_gpu_batch_size and max_gpu_batch_size > global_batch_size:
            raise UserError(
                f"elastic.init: max_gpu_batch_size {max_gpu_batch_size} is above global_batch_size {global_batch_size}"
            )
        made = self._connect(policy, seed=seed, environ=os.environ)
        self._seed_framework(seed)
        self._context = made
        job.enter(made, gpus or max(1, self._count_gpus()))
        atexit.register(made.close)
        return made

    def context(self) -> ContextT:
        """This process's part in its job.

        Raises:
            UserError: `init` has not been called.
        """
        if self._context is None:
            raise UserError("call elastic.init(global_batch_size, max_gpu_batch_size) first")
        return self._context

    def rank(self) -> int:
        """This worker's place in the present world."""
        return self.context().rank

    def size(self) -> int:
        """Number of workers in the present world."""
        return self.context().size

    def run(self, train: Callable[[StateT], Any]) -> Callable[[StateT], Any]:
        """Make a training function elastic: called with the state, it is entered anew in each world until it returns.

        A worker that is told to leave ends its process with status 0 at the next commit.
        """

        @functools.wraps(train)
        def wrapped(state: StateT) -> Any:
            return self.train(lambda: train(state), state)

        return wrapped

    def train(self, train: Callable[[], Result], state: TrainingState, hooks: Hooks | None = None) -> Result:
        """Enter ``train`` in each world until it returns, and tell the master how it ended.

        A worker that is told to leave ends its process with status 0.
        """
        context = self.context()
        self.trained = True
        try:
            result = context.run(train, state, hooks)
        except Stopped as stopped:
            log.info("leaving: %s", stopped.reason)
            context.close()
            sys.exit(0)
        except Exception as error:
            context.fail(f"{type(error).__name__}: {error}", traceback.format_exc())
            context.close()
            raise
        context.finish(step=state.step, epochs=state.progress.epoch, metrics={})
        return result
