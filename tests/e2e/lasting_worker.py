"""A worker that speaks to its master as all do (`elasticdl.elastic.link.session`), and counts instead of training.

The loss of a step is its number. Argument: the number of steps after which it has finished.
"""

import os
import signal
import sys
import threading
import time

from elasticdl.common.environment import WorkerEnvironment
from elasticdl.elastic.core import messages as m
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.position import Position
from elasticdl.elastic.core.progress import Progress, SampleOrder, StepPlan
from elasticdl.elastic.core.step_times import Activity
from elasticdl.elastic.core.vote import Vote
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.link.session import Session
from elasticdl.elastic.link.stream import MasterStream

STEP_SECONDS = 0.02
EPOCH = 50
SAMPLES = 8


def plan(step):
    epoch, within = divmod(step - 1, EPOCH)
    after = Progress(epoch, SAMPLES * (within + 1), step, SAMPLES * step)
    return StepPlan(epoch, step, SAMPLES, after, ())


def count(session, world, broken, steps):
    """In one world; returns what the worker is to do then."""
    core = session.core
    newest = max(core.position.progress.step, 0 if world.is_first else world.root.step)
    core.synced(plan(newest).after if newest else Progress())
    session.post(p.Trigger.SYNCED)
    core.reporting.totals = steps, steps // EPOCH
    for step in range(newest + 1, steps + 1):
        if broken.wait(STEP_SECONDS):
            session.post(p.CollectiveFailed("a member is gone"))
            return False
        core.reporting.advance(Activity.ALIVE, time.monotonic())
        core.begin(plan(step))
        core.voted(Vote(core.leaving, SAMPLES, float(step)), time.monotonic())
        core.step_made(0.1, time.monotonic())
        if core.commit():
            session.post(p.WorldLeft("the members voted to leave this world"))
            return False
        if step % EPOCH == 0:
            core.position.progress = core.position.progress.next_epoch()
    return True


def train(session, broken, steps):
    """Through as many worlds as it takes; whether it came to the end."""
    session.core.bind(Position(order=SampleOrder(SAMPLES * EPOCH, BatchPolicy(SAMPLES, None))))
    session.post(p.Trigger.READY)
    while True:
        match session.order():
            case p.Connect():
                broken.clear()
                session.post(p.Trigger.CONNECTED)
            case p.Synchronize(world):
                if count(session, world, broken, steps):
                    return True
            case p.LeaveWorld(_, is_broken):
                session.core.position.undo() if is_broken else session.core.position.leave()
                session.post(p.Trigger.CLOSED)
            case p.LeaveJob(reason):
                print(f"leaving: {reason}", flush=True)
                return False
            case p.Fail(_, message):
                raise SystemExit(message)


def main():
    environment = WorkerEnvironment.from_env(os.environ)
    assert environment is not None
    broken = threading.Event()
    session = Session(WorkerCore(environment.worker_id), MasterStream(environment))
    session.break_collective = lambda version: broken.set()
    signal.signal(signal.SIGTERM, lambda *_: session.post(p.Terminated("SIGTERM")))
    session.open()
    try:
        if train(session, broken, int(sys.argv[1])):
            print("finished", flush=True)
            epochs = int(sys.argv[1]) // EPOCH
            session.say(m.Finished(int(sys.argv[1]), epochs, {"accuracy": 0.9}, together=False))
    finally:
        session.close()


if __name__ == "__main__":
    main()
