"""The worker process: ``python -m elasticdl.worker.main``, started by a launcher with the variables it needs.

Exit codes: 0 done, or told to leave; 1 the user's code raised, or this worker can't go on (the master knows which).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from elasticdl.common.credentials import WorkerEnvironment
from elasticdl.common.errors import ElasticDLError, UserError
from elasticdl.elastic.collectives.horovod import prepare_horovod
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.protocol import Stopped
from elasticdl.elastic.link.session import MasterConnection, Session
from elasticdl.elastic.training.runtime import failure_of
from elasticdl.job.spec import TRAIN, JobSpec
from elasticdl.worker.inference import Pass
from elasticdl.worker.learner import batch_policy, build_model, framework_of, import_learner
from elasticdl.worker.trainer import Trainer
from elasticdl.worker.zoo import load_module

log = logging.getLogger("elasticdl.worker")


class _Leaving(BaseException):
    """Raised by a signal in the midst of the user's code, which must not take it for an error of its own."""


def main() -> int:
    try:
        environment = WorkerEnvironment.from_env(os.environ)
        if environment is None:
            raise UserError("a worker is started by its job's master: use `elasticdl train`")
        spec = JobSpec.from_json(Path(environment.job_spec).read_text())
        layout = f"%(asctime)s worker {environment.worker_id} %(levelname)s %(message)s"
        logging.basicConfig(stream=sys.stderr, level=spec.log_level, format=layout)
        prepare_horovod(os.environ)
        link = MasterConnection(environment)
        link.open()  # before what takes long and may fail: the framework's import and the user's code
    except (ElasticDLError, OSError) as error:
        print(f"elasticdl worker: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, functools.partial(_leave, link.session))
    with contextlib.ExitStack() as closers:
        closers.callback(link.close)
        try:
            return _work(spec, link, closers)
        except _Leaving:
            return 0
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is leaving already, and what is left has a deadline


def _work(spec: JobSpec, link: MasterConnection, closers: contextlib.ExitStack) -> int:
    """``closers`` take what must stay open until a failure has been reported."""
    try:
        module = load_module(spec)
        model = build_model(module, spec.seed)
        kind = import_learner(framework_of(model, module))
        # The processes that load data are forked from one that has all this imported, instead of importing it each.
        multiprocessing.set_forkserver_preload([kind.__module__])
        context = kind.context_class.connect(batch_policy(spec), seed=spec.seed, environ=os.environ, link=link)
        closers.callback(context.close)
        work: Trainer | Pass
        if spec.task == TRAIN:
            work = Trainer(spec, context, kind(module, spec, context, model))
        else:
            work = Pass(spec, context, module, kind, model)
        gc.freeze()  # what has been made by now stays: the collector need not go through it again
        work.run()
    except Stopped as stopped:
        log.info("leaving: %s", stopped.reason)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything, and the master must hear of it
        _report(error, link.session)
        return 1
    return 0


def _report(error: Exception, session: Session) -> None:
    own = isinstance(error, ElasticDLError) and not isinstance(error, UserError)
    failed = failure_of(error, users=not own and not _is_of_the_device(error))
    log.error("%s", failed.traceback or failed.message)
    session.say(failed)


def _is_of_the_device(error: Exception) -> bool:
    """Whether the device has failed. PyTorch has a class for it since 2.8; before, and in TensorFlow, only the text tells."""
    if isinstance(error, getattr(sys.modules.get("torch"), "AcceleratorError", ())):
        return True
    told = isinstance(error, RuntimeError) or type(error).__module__.startswith("tensorflow")
    return told and any(mark in str(error) for mark in ("CUDA error", "CUDA_ERROR_"))


def _leave(session: Session, signum: int, frame: FrameType | None) -> None:
    """SIGTERM before there is a state to keep; once the loop runs, the context handles it."""
    if session.core.leaving or session.core.lingers:  # the loop has taken it, and may be writing its last checkpoint
        return
    session.post(p.Terminated("told to leave (SIGTERM)"))
    raise _Leaving


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
