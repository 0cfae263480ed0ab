"""The functions that a training script of one's own calls; each framework's package offers them under their names.

A process takes part in one job, as Horovod knows one world per process; so they speak of that one.

And what begins and ends a script's part: seeds, its children, how a failure is told.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import numpy as np

from elasticdl.common.credentials import CONNECTED, MASTER, WORKER_ID
from elasticdl.common.errors import ShortOfMemoryError, UserError
from elasticdl.common.reason import reason, tell_uncaught_in_one_line
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import ALONE, StageSuperseded, Stopped
from elasticdl.elastic.training.batch_shape import job, make_policy, whole_number
from elasticdl.elastic.training.data_facts import EVALUATION
from elasticdl.elastic.training.evaluation import Evaluator
from elasticdl.elastic.training.job import ContextT, Hooks
from elasticdl.elastic.training.state import TrainingState
from elasticdl.job import messages as m

# Processes that a worker's script starts, and that take no part in the job: those that load its data, above all.
#
# Python's ``spawn`` and ``forkserver`` import the script anew in each of them, and run whatever stands at its top level.

GUARD = 'if __name__ == "__main__":'


def imports_the_script_anew() -> bool:
    """Whether multiprocessing has started this process, which has come no further than to import what it needs."""
    process = multiprocessing.current_process()
    # `parent_process` is set later; and a fork server, which may import the script once for all, is a MainProcess.
    return process.name != "MainProcess" or bool(getattr(process, "_inheriting", False))


def belongs_to_a_worker(environ: Mapping[str, str]) -> bool:
    """Whether the process that started this one, or one before, is the worker: it has set the variable."""
    return MASTER in environ and environ.get(CONNECTED) == environ[MASTER]


# What the master is told of an error that ends a worker.


def failure_of(error: BaseException, *, users: bool, helps: Callable[[], str] = str) -> m.Failed:
    """``users``: no other worker would do better. ``helps``: gives what helps where the user's code has raised."""
    line = reason(error)
    if isinstance(error, UserError):  # which says all in its line
        return m.failed(line, "", users=users)
    advice = helps()
    trace = "".join(traceback.format_exception(error))
    return m.failed(f"{line}; {advice}" if advice else line, trace, users=users)


# Random numbers of Python and NumPy, which scripts draw from to split and shuffle their data: the same on all workers.
#
# They, and those of PyTorch and TensorFlow, are seeded when a worker's Python starts (`sitecustomize`). A seed of the script's own stays.

SEED = 0  # at the start
SEEDED = "ELASTICDL_SEEDED"  # set where they were


@contextlib.contextmanager
def kept_streams(*, pythons: bool = True, numpys: bool = True) -> Iterator[None]:
    """Within, the generators are anybody's; afterwards those that are asked for are as before."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        if pythons:
            random.setstate(states[0])
        if numpys:
            np.random.set_state(states[1])


def used_streams_kept() -> AbstractContextManager[None]:
    """Within, the generators may be seeded; afterwards those that the script of a worker has seeded or drawn from are as before."""
    seeded = SEEDED in os.environ  # else nobody knows what has been done to Python's
    return kept_streams(pythons=seeded and _python_is_used(), numpys=seeded and _numpy_is_used())


def seed_if_unused(seed: int) -> None:
    """Unless the script has drawn from them, or has seeded them: then they stay."""
    if not _python_is_used():
        random.seed(seed)
    if not _numpy_is_used():
        np.random.seed(seed % 2**32)


def _python_is_used() -> bool:
    return random.getstate() != random.Random(SEED).getstate()


def _numpy_is_used() -> bool:
    kind, key, *rest = np.random.get_state()
    first_kind, first_key, *first_rest = np.random.RandomState(SEED).get_state()
    return (kind, rest) != (first_kind, first_rest) or not np.array_equal(key, first_key)


log = logging.getLogger(__name__)

INIT_TWICE = "elastic.init() was called before; a process takes part in one job"

Result = TypeVar("Result")
StateT = TypeVar("StateT", bound=TrainingState)


def rank_by_launcher(environ: Mapping[str, str]) -> int:
    """Before anything is known of other workers: 0 on the job's very first one, and not in processes that it starts."""
    if MASTER not in environ:
        return 0
    return int(belongs_to_a_worker(environ) or imports_the_script_anew() or environ.get(WORKER_ID) != "0")


class ScriptRuntime(Generic[ContextT]):
    """The job that this process takes part in, once `init` has been called."""

    def __init__(
        self, kind: type[ContextT], seed_framework: Callable[[int], Any], count_gpus: Callable[[], int]
    ) -> None:
        self._kind = kind
        self._seed_framework = seed_framework
        self._count_gpus = count_gpus
        self._context: ContextT | None = None
        self._pid = 0  # of the process that called `init`
        self._in_child = False  # which takes no part in the job
        self._finished = False  # the master was told that training is complete
        self._failed = False  # the master was told what went wrong
        self._last: TrainingState | None = None  # of a stage that ended well, and may have been the last
        self.in_training: TrainingState | None = None  # what a function below `run` trains at present
        self._finish: Callable[[], TrainingState | None] | None = None  # a training in place, once the script has ended
        self._about_failure: Callable[[], str] = str
        tell_uncaught_in_one_line()  # what is called before the job is joined may refuse, too

    def init(
        self,
        global_batch_size: int | None = None,
        max_gpu_batch_size: int | None = None,
        gpus: int | None = None,
        *,
        batch_size_per_worker: int | None = None,
        seed: int = 0,
    ) -> ContextT:
        """Join the job that this process was started for, or run alone; call it once, before building the optimizer:
        ``elastic.init(global_batch_size=256, max_gpu_batch_size=64)`` (docs/library.md).

        A process that the script itself has started takes no part in the job: the functions answer as for a script that runs
        alone. Where multiprocessing has started it, `run` refuses to train.

        Args:
            global_batch_size: samples that make one optimizer step, whatever the number of workers.
            max_gpu_batch_size: most samples that a worker runs through the model at once; more are accumulated. None: no bound.
            gpus: on how many GPUs the script's own loop computes, if it runs alone; None: all there are.
            batch_size_per_worker: instead of ``global_batch_size``, samples per step and worker: the global batch grows with
                the workers.
            seed: of the order of samples, and of what is drawn in a step; at least 0.

        Returns:
            This process's part in the job, as `context` returns it.

        Raises:
            ArgumentError: the numbers make no sense.
            UserError: `init` was called before, Horovod is missing, or the environment is unusable.
        """
        if job.context is not None:  # be it of another framework
            raise UserError(INIT_TWICE)
        gpus = None if gpus is None else whole_number("gpus", gpus)
        seed = whole_number("seed", seed, least=0, below=2**64)
        policy = make_policy(global_batch_size, batch_size_per_worker, max_gpu_batch_size)
        made = self._join(policy, seed, gpus)
        self._seed_framework(seed)
        seed_if_unused(seed)
        return made

    def init_in_place(self, global_batch_size: int) -> ContextT:
        """As `init`, for a script that trains in its own loop: its random streams stay as they are.

        Raises:
            UserError: as `init`.
        """
        if job.context is not None:
            raise UserError(INIT_TWICE)
        with kept_streams():  # importing and connecting may draw
            return self._join(make_policy(global_batch_size, None, None), 0, None)

    def _join(self, policy: BatchPolicy, seed: int, gpus: int | None) -> ContextT:
        tell_uncaught_in_one_line()
        self._in_child = imports_the_script_anew()
        alone = self._in_child or belongs_to_a_worker(os.environ)
        if not self._in_child:  # processes that load data are forked from one that has the framework imported
            multiprocessing.set_forkserver_preload([self._kind.__module__])
        made = self._kind.connect(policy, seed=seed, environ={} if alone else os.environ)
        self._context, self._pid = made, os.getpid()
        job.context, job.gpus = made, gpus or max(1, self._count_gpus())
        atexit.register(self._end)
        return made

    @property
    def has_begun(self) -> bool:
        """`init` has been called."""
        return self._context is not None

    def train_whole(self) -> None:
        """The script's own loop trains as one worker: the numbers that it asks for are those of one."""
        job.take_whole()
        self.context().allow_steps()

    def train_in_place(
        self, finish: Callable[[], TrainingState | None], about_failure: Callable[[], str] = str
    ) -> None:
        """The script trains in its own loop. ``finish`` is called at its end, if that is no error; it returns when training
        is complete on all workers, with the state, or with None if there was no training. ``about_failure``: what helps where the
        script raises; empty if nothing is known.

        Raises:
            UserError: this process takes no part in the job, or trains already.
        """
        self._require_worker()
        if self._finish is not None:
            raise UserError(
                "elastic.prepare() was called before: a script trains one model, with one optimizer and one loader"
            )
        self._finish, self._about_failure = finish, about_failure

    def leave(self) -> None:
        """This worker was told to leave: the others go on."""
        self._finish = None
        self.context().close()

    def context(self) -> ContextT:
        """This process's part in its job: its rank, the world's size, its device, as ``elastic.context().world`` (docs/library.md).

        Raises:
            UserError: `init` has not been called.
        """
        if self._context is None:
            raise UserError("call elastic.init(global_batch_size, max_gpu_batch_size) first")
        return self._context

    def rank(self) -> int:
        """This worker's place in the present world; before the first, and before `init`, it is 0 on one worker, and never on one that
        comes later. Ask each time: ``if elastic.rank() == 0:`` (docs/library.md)."""
        return rank_by_launcher(os.environ) if self._context is None else self.context().known_rank

    def size(self) -> int:
        """Number of workers in the present world; 1 before the first: ``elastic.size()`` (docs/library.md).

        Raises:
            UserError: `init` has not been called.
        """
        return self.context().size

    def run(self, train: Callable[[StateT], Any]) -> Callable[[StateT], Any]:
        """Make a training function elastic: called with the state, it is entered anew in each world until it returns.

        A worker that is told to leave ends its process with status 0 at the next commit. As a decorator: ``@elastic.run``, in
        the example above; or ``elastic.run(train)(state)`` (docs/library.md).

        Args:
            train: takes the state, and trains from where the state stands.

        Returns:
            The function to call with the state. It returns what ``train`` returns in the last world, and raises what ``train`` raises.
        """

        @functools.wraps(train)
        def wrapped(state: StateT) -> Any:
            return self.train(lambda: train(state), state)

        return wrapped

    def train(self, train: Callable[[], Result], state: TrainingState, hooks: Hooks | None = None) -> Result:
        """Enter ``train`` in each world until it returns, and tell the master how it ended.

        A worker that is told to leave ends its process with status 0.
        """

        result = self.train_stage(train, state, hooks)
        self._look_back()
        self._tell_end()
        return result

    def train_stage(self, train: Callable[[], Result], state: TrainingState, hooks: Hooks | None = None) -> Result:
        """As `train`, where more training may follow: the master hears that it is complete when the process ends.

        Raises:
            UserError: the master was told already that training is complete.
            StageSuperseded: one of the hooks has raised it.
        """
        context = self.context()
        self._require_worker()
        job.require_divided()
        context.allow_steps()
        self._last, self.in_training = None, state
        try:
            result = context.run(train, state, hooks)
        except Stopped as stopped:
            log.info("leaving: %s", stopped.reason)
            context.close()
            sys.exit(0)
        except StageSuperseded:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit):  # the others would wait, and a replacement would come to the same place
                text = (
                    f"sys.exit({error.code!r}) was called within training: return from the function below @elastic.run "
                )
                self._tell_failure(UserError(text + "instead, on all workers"))
            else:
                self._tell_failure(error)
            context.close()
            raise
        finally:
            self.in_training = None
        self._last = state
        return result

    def evaluate(self, evaluator: Evaluator) -> dict[str, float]:
        """The metrics, on all workers. Within training all call it alike. Without, the first makes the whole of the job, in which workers
        may come and go; in a later one, or after training, each worker runs all samples.

        Raises:
            WorldBroken: a worker was lost within training.
        """
        if self.context().under_master and self.in_training is None and not self._finished:
            return self.train(lambda: evaluator.evaluate().metrics, evaluator.state(EVALUATION, {}))
        return evaluator.evaluate(world=ALONE if self._finished else None).metrics  # the others may be gone

    def _require_worker(self) -> None:
        if self._in_child or os.getpid() != self._pid:
            raise UserError(
                "training was begun in a process that the script has started, to load data perhaps, and which imports the "
                f"script anew: put what the script does below `{GUARD}`"
            )
        if self._finished and job.under_master:
            raise UserError(
                "training was complete already: under `elasticdl run` a script calls @elastic.run's function once, and elastic.evaluate() "
                "within training or after it"
            )

    def _end(self) -> None:
        if self._context is not None and os.getpid() == self._pid:  # not in a fork
            finish, self._finish = self._finish, None
            if finish is not None and getattr(sys, "last_value", None) is None:
                try:
                    self._last = finish()
                    self._look_back()
                except SystemExit as told:  # to leave; Python is at its end anyway
                    log.debug("the script ends with %s", told)
                except Exception as error:  # noqa: BLE001  whatever it is, the master is told
                    print(reason(error), file=sys.stderr) if isinstance(
                        error, UserError
                    ) else traceback.print_exception(error)
                    self._tell_failure(error)
            self._tell_end()
            self._context.close()

    def _look_back(self) -> None:
        """Training is complete.

        Raises:
            UserError: nothing was made of the batches.
        """
        if self._last is not None and self.context().under_master:
            self._last.require_steps()
        if self._last is not None and self.rank() == 0 and (oversight := self._last.oversight()):
            self.context().warn(oversight)

    def _tell_end(self) -> None:
        """Tell the master how it ended, as far as that is known here and not there."""
        state, self._last = self._last, None
        error = getattr(sys, "last_value", None)  # what the interpreter ends with
        if self._finished or self._failed:
            return
        if isinstance(error, Exception):  # outside training, or before it: no other worker would do better
            self._tell_failure(error)
        elif state is not None:
            self._finished = True
            if self.rank() == 0:
                self.context().tell_steps_over(state.step)
            self.context().finish(step=state.step, epochs=state.progress.epoch, metrics={})

    def _tell_failure(self, error: Exception) -> None:
        self._failed = True
        users = not isinstance(error, ShortOfMemoryError)
        self.context().session.say(failure_of(error, users=users, helps=self._about_failure))
