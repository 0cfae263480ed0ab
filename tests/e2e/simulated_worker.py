"""A worker without a framework: speaks the session's protocol, and counts instead of training.

Rank 0 reports a step each `STEP_SECONDS`. SIGTERM makes it drain; it can be frozen (SIGSTOP) and killed from outside.
Argument: the number of steps after which it has finished.
"""

import os
import queue
import signal
import sys
import threading

from elasticdl.common.channel import metadata, open_channel
from elasticdl.common.credentials import WorkerEnvironment
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

STEP_SECONDS = 0.02
SAMPLES = 8


class SimulatedWorker:
    def __init__(self, environment: WorkerEnvironment, steps: int) -> None:
        self.environment = environment
        self.steps = steps
        self.step = 0
        self.world = pb.World()
        self.ended = threading.Event()
        self.out: queue.SimpleQueue[pb.WorkerMessage | None] = queue.SimpleQueue()
        self.lock = threading.Lock()

    def run(self) -> int:
        signal.signal(signal.SIGTERM, lambda *_: self.leave("SIGTERM"))
        hello = pb.Hello(worker_id=self.environment.worker_id, host="127.0.0.1", pid=os.getpid())
        self.out.put(pb.WorkerMessage(hello=hello))
        self.out.put(pb.WorkerMessage(ask=pb.Ask()))
        threading.Thread(target=self.train, daemon=True).start()
        credentials = self.environment.credentials
        with open_channel(self.environment.master, credentials) as channel:
            session = pb_grpc.MasterStub(channel).Session(iter(self.out.get, None), metadata=metadata(credentials))
            for message in session:
                self.take(message)
        return 0

    def take(self, message: pb.MasterMessage) -> None:
        kind = message.WhichOneof("body")
        with self.lock:
            if kind == "world":
                self.world = message.world
                self.step = message.world.root.step if message.world.standing else 0
            elif kind in ("change", "broken") and getattr(message, kind).world_version == self.world.version:
                self.ask(broken=kind == "broken")
            elif kind in ("drain", "stop_work"):
                self.leave(getattr(message, kind).reason)

    def ask(self, broken: bool) -> None:
        ask = pb.Ask(left_world=self.world.version, step=self.step, has_state=True, broken=broken)
        self.world = pb.World()
        self.out.put(pb.WorkerMessage(ask=ask))

    def leave(self, reason: str) -> None:
        self.out.put(pb.WorkerMessage(draining=pb.Draining(reason=reason)))
        self.out.put(None)

    def train(self) -> None:
        while not self.ended.wait(STEP_SECONDS):
            with self.lock:
                beat = pb.Heartbeat(world_version=self.world.version, step=self.step, progress=self.step)
                self.out.put(pb.WorkerMessage(heartbeat=beat))
                if self.world.version:
                    self.train_step()

    def train_step(self) -> None:
        self.step += 1
        self.report()
        if self.step >= self.steps:
            self.ended.set()
            done = pb.Finished(step=self.step, epochs=1, metrics={"accuracy": 0.9})
            self.out.put(pb.WorkerMessage(finished=done))
            self.out.put(None)

    def report(self) -> None:
        if self.world.rank == 0:
            made = {"step": self.step, "loss": 1 / self.step, "samples": SAMPLES, "seconds": STEP_SECONDS}
            step = pb.StepReport(**made, total_samples=SAMPLES * self.step)
            progress = pb.Progress(steps=[step], total_steps=self.steps, total_epochs=1)
            self.out.put(pb.WorkerMessage(progress=progress))


if __name__ == "__main__":
    environment = WorkerEnvironment.from_env(os.environ)
    assert environment is not None
    sys.exit(SimulatedWorker(environment, int(sys.argv[1])).run())
