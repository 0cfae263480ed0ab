"""A worker without a framework: speaks the session's protocol, and counts instead of training, for ever.

Rank 0 reports a step each `STEP_SECONDS`. SIGTERM makes it drain; it can be frozen (SIGSTOP) and killed from outside.
"""

import os
import queue
import signal
import threading
import time

from elasticdl.common.channel import metadata, open_channel
from elasticdl.common.credentials import WorkerEnvironment
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as pb_grpc

STEP_SECONDS = 0.02
SAMPLES = 8


class SimulatedWorker:
    def __init__(self) -> None:
        self.step = 0
        self.world = pb.World()
        self.out: queue.SimpleQueue[pb.WorkerMessage | None] = queue.SimpleQueue()
        self.lock = threading.Lock()

    def run(self, environment: WorkerEnvironment) -> None:
        signal.signal(signal.SIGTERM, lambda *_: self.leave("SIGTERM"))
        hello = pb.Hello(worker_id=environment.worker_id, host="127.0.0.1", pid=os.getpid())
        self.out.put(pb.WorkerMessage(hello=hello))
        self.out.put(pb.WorkerMessage(ask=pb.Ask()))
        threading.Thread(target=self.train, daemon=True).start()
        credentials = environment.credentials
        with open_channel(environment.master, credentials) as channel:
            session = pb_grpc.MasterStub(channel).Session(iter(self.out.get, None), metadata=metadata(credentials))
            for message in session:
                self.take(message)

    def take(self, message: pb.MasterMessage) -> None:
        kind = message.WhichOneof("body")
        with self.lock:
            if kind == "world":
                self.world = message.world
                self.step = message.world.root.step if message.world.standing else 0
            elif kind in ("change", "broken") and getattr(message, kind).world_version == self.world.version:
                ask = pb.Ask(left_world=self.world.version, step=self.step, has_state=True, broken=kind == "broken")
                self.world = pb.World()
                self.out.put(pb.WorkerMessage(ask=ask))
            elif kind in ("drain", "stop_work"):
                self.leave(getattr(message, kind).reason)

    def leave(self, reason: str) -> None:
        self.out.put(pb.WorkerMessage(draining=pb.Draining(reason=reason)))
        self.out.put(None)

    def train(self) -> None:
        while True:
            time.sleep(STEP_SECONDS)
            with self.lock:
                beat = pb.Heartbeat(world_version=self.world.version, step=self.step, progress=self.step)
                self.out.put(pb.WorkerMessage(heartbeat=beat))
                self.step += self.world.version > 0
                if self.world.version and self.world.rank == 0:
                    made = {"step": self.step, "loss": 1 / self.step, "samples": SAMPLES, "seconds": STEP_SECONDS}
                    step = pb.StepReport(**made, total_samples=SAMPLES * self.step)
                    self.out.put(pb.WorkerMessage(progress=pb.Progress(steps=[step], total_epochs=1)))


if __name__ == "__main__":
    found = WorkerEnvironment.from_env(os.environ)
    assert found is not None
    SimulatedWorker().run(found)
