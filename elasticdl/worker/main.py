"""The worker process: ``python -m elasticdl.worker.main``, started by a launcher with the variables it needs.

Exit codes: 0 done, or told to leave; 1 the user's code raised, or this worker can't go on (the master knows which).
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from elasticdl.common.environment import WorkerEnvironment
from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.common.spec import JobSpec
from elasticdl.elastic.errors import Stopped
from elasticdl.elastic.torch.context import ElasticContext, connect
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.worker.checkpoint_writer import CheckpointWriter
from elasticdl.worker.torch_trainer import TorchLearner, batch_policy
from elasticdl.worker.trainer import Trainer
from elasticdl.worker.user_code import one_line, users_traceback
from elasticdl.worker.zoo import load_module, make_callbacks

log = logging.getLogger("elasticdl.worker")


class _Leaving(BaseException):
    """Raised by a signal in the midst of the user's code, which must not take it for an error of its own."""


def main() -> int:
    try:
        environment = WorkerEnvironment.from_env(os.environ)
        if environment is None:
            raise UserError("a worker is started by its job's master: use `elasticdl train`")
        spec = JobSpec.from_json(Path(environment.job_spec).read_text())
        _log_to_stderr(spec, environment.worker_id)
        context = connect(batch_policy(spec), seed=spec.seed, environ=os.environ)
    except (ElasticDLError, OSError) as error:
        print(f"elasticdl worker: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, functools.partial(_leave, context))
    # The processes that load data are forked from one that has all this imported, instead of importing it each.
    multiprocessing.set_forkserver_preload([__spec__.name])
    try:
        return _work(spec, context)
    except _Leaving:
        return 0
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is leaving already, and what is left has a deadline
        context.close()


def _work(spec: JobSpec, context: ElasticContext) -> int:
    try:
        module = load_module(spec)
        learner = TorchLearner(module, spec, context)
        checkpoints = CheckpointWriter(learner.store, context.membership) if learner.store else None
        Trainer(spec, context, learner, make_callbacks(module), checkpoints).run()
    except Stopped as stopped:
        log.info("leaving: %s", stopped.reason)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and the master must hear of it
        _report(error, Path(spec.model_zoo), context)
        return 1
    return 0


def _report(error: Exception, folder: Path, context: ElasticContext) -> None:
    if isinstance(error, UserError):
        log.error("%s", error)
        context.fail(str(error), "")
    elif isinstance(error, ElasticDLError) or (isinstance(error, RuntimeError) and "CUDA error" in str(error)):
        log.error("%s", error)
        failed = pb.Failed(cause=pb.Failed.WORKER, message=one_line(error))
        context.membership.say(pb.WorkerMessage(failed=failed))
    else:
        text = users_traceback(error, folder)
        log.error("the user's code raised\n%s", text)
        context.fail(one_line(error), text)


def _leave(context: ElasticContext, signum: int, frame: FrameType | None) -> None:
    """SIGTERM before there is a state to keep; once the loop runs, the context handles it."""
    if context.leaving:  # it is, and may be writing its last checkpoint
        return
    context.membership.drain("told to leave (SIGTERM)")
    raise _Leaving


def _log_to_stderr(spec: JobSpec, worker_id: int) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=spec.log_level,
        format=f"%(asctime)s worker {worker_id} %(levelname)s %(message)s",
    )


def _leave_process(code: int) -> NoReturn:
    """End without taking the interpreter down piece by piece: with a framework loaded that takes seconds of CPU, in
    which whoever preempted this worker waits for its device. What was registered to run at the end is run."""
    atexit._run_exitfuncs()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave_process(main())
