"""A worker that speaks to its master as all do (`elasticdl.elastic.session.membership`), and counts instead of training.

The loss of a step is its number. Argument: the number of steps after which it has finished.
"""

import os
import signal
import sys
import threading

from elasticdl.common.environment import WorkerEnvironment
from elasticdl.elastic.core.errors import Stopped
from elasticdl.elastic.session.membership import JoinRequest, Session
from elasticdl.elastic.session.reports import StepReport
from elasticdl.proto import elasticdl_pb2 as pb

STEP_SECONDS = 0.02
EPOCH = 50
SAMPLES = 8


def report(step, world, steps):
    return StepReport(
        step=step,
        epoch=(step - 1) // EPOCH,
        loss=float(step),
        samples=SAMPLES,
        learning_rate=0.1,
        seconds=STEP_SECONDS,
        world_version=world.version,
        total_samples=SAMPLES * step,
        ends_epoch=step % EPOCH == 0,
        total_steps=steps,
        total_epochs=steps // EPOCH,
    )


def train(session, broken, steps):
    """Through as many worlds as it takes."""
    standing = JoinRequest(step=0, has_state=False)
    while standing.step < steps:
        world = session.join(standing)
        broken.clear()
        step = max([standing.step, *(member.step for member in world.members if member.has_state)])
        while step < steps and not session.leaving and not broken.wait(STEP_SECONDS):
            step += 1
            session.advance(waiting=False)
            session.reached(step)
            session.report_step(report(step, world, steps))
        standing = JoinRequest(step, has_state=True, broken=broken.is_set(), reason="left")
    print("finished", flush=True)
    session.say(pb.WorkerMessage(finished=pb.Finished(step=steps, epochs=steps // EPOCH, metrics={"accuracy": 0.9})))


def main():
    environment = WorkerEnvironment.from_env(os.environ)
    assert environment is not None
    session, broken = Session(environment), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: session.drain("SIGTERM"))
    session.open(on_broken=broken.set)
    try:
        train(session, broken, int(sys.argv[1]))
    except Stopped as stopped:
        print(f"leaving: {stopped.reason}", flush=True)
    finally:
        session.close()


if __name__ == "__main__":
    main()
