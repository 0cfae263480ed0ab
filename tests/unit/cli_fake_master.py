"""A master that only pretends: it serves the command line's calls and plays a part.

`FakeMaster` is served with `serving`. In a command `PlayedMaster` stands in for the master of a job on this machine; ``--model_def``
says which part it plays.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent import futures
from contextlib import contextmanager
from typing import TextIO

import grpc
from google.protobuf import json_format

from elasticdl.cli.signals import FINGER_SECONDS
from elasticdl.common.errors import UserError
from elasticdl.job.jobdir import JobDir, MasterAddress, jobs_root, write_aside
from elasticdl.job.spec import JobSpec
from elasticdl.proto import elasticdl_pb2 as pb
from elasticdl.proto import elasticdl_pb2_grpc as rpc

TOKEN = "secret"
DEADLINE = 30.0


class FakeMaster(rpc.MasterServicer):
    """Sends out what is given to `update`, and keeps in words what it was asked for."""

    def __init__(self, job_name: str) -> None:
        self.told: list[str] = []  # to do what
        self.once_watched: list[Callable[[], object]] = []
        self.at_stop: Callable[[], object] = lambda: None
        self._status = pb.JobStatus(job_name=job_name, phase="pending", time_left=-1, min_workers=1, max_workers=2)
        self._statuses = [pb.JobStatus.FromString(self._status.SerializeToString())]
        self._ended = False
        self._watched = threading.Event()
        self._changed = threading.Condition()

    def update(self, **fields: object) -> None:
        with self._changed:
            self._status.MergeFrom(pb.JobStatus(**fields))
            self._statuses.append(pb.JobStatus.FromString(self._status.SerializeToString()))
            self._changed.notify_all()

    def end(self) -> pb.JobStatus:
        """End the streams; returns the last status."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return self._statuses[-1]

    def wait_for_watcher(self) -> None:
        assert self._watched.wait(DEADLINE)

    def Status(self, request, context):
        self._authenticate(context)
        return self._statuses[-1]

    def Watch(self, request, context):
        self._authenticate(context)
        self._watched.set()
        self._is_watched()
        sent, over = 0, False
        while not over:
            with self._changed:
                assert self._changed.wait_for(lambda seen=sent: len(self._statuses) > seen or self._ended, DEADLINE)
                fresh, over = self._statuses[sent:], self._ended
            yield from fresh
            sent += len(fresh)

    def Events(self, request, context):
        """What the job's folder has."""
        self._authenticate(context)
        self._is_watched()
        journal, told, is_last = JobDir(jobs_root() / self._status.job_name).journal, 0, False
        while not is_last and context.is_active():
            is_last = self._ended or not request.follow
            lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
            whole = [line for line in lines if line.endswith("\n")]
            yield from (pb.JournalEntry(json=line.removesuffix("\n")) for line in whole[told:])
            told = len(whole)
            time.sleep(0.02)

    def Scale(self, request, context):
        self._record(context, f"scale {request.min_workers}-{request.max_workers}")
        if request.max_workers > 8:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this machine has 8 slots")
        return pb.ScaleReply(message=f"from {request.min_workers} to {request.max_workers} workers")

    def Stop(self, request, context):
        words = {"checkpoint": request.checkpoint, "now": request.now}
        self._record(context, " ".join(["stop", *(word for word, given in words.items() if given)]))
        self.at_stop()
        return pb.StopReply()

    def _is_watched(self):
        while self.once_watched:
            self.once_watched.pop(0)()

    def _record(self, context, words):
        self._authenticate(context)
        self.told.append(words)

    def _authenticate(self, context):
        if ("elasticdl-token", TOKEN) not in [tuple(item) for item in context.invocation_metadata()]:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")


@contextmanager
def serving(master: FakeMaster):
    """Serve it; yields its address."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    rpc.add_MasterServicer_to_server(master, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield MasterAddress(f"127.0.0.1:{port}", TOKEN, os.getpid())
    finally:
        master.end()
        server.stop(grace=1).wait(DEADLINE)


def play(master: FakeMaster, journal: TextIO, part: str, stopped: threading.Event) -> None:
    """One job from its start to its end."""

    numbers = itertools.count(1)

    def tell(event: str, **fields: object) -> None:
        print(json.dumps({"number": next(numbers), "time": 0.0, "event": event, **fields}), file=journal, flush=True)

    master.update(phase="running", step=0, total_steps=20, total_epochs=2)
    tell("world_formed", world=1, members=[0, 1], step=0, reason="2 workers are ready")
    if part == "fails":
        master.update(phase="failed", reason="worker 1: ValueError: bad sample", traceback="Traceback\nValueError: bad")
        return
    for step in range(1, 21):
        master.update(step=step, epoch=(step - 1) // 10, loss=1 / step, samples=32 * step, samples_per_second=1000.0)
    tell("evaluation", step=20, epoch=1, samples=64, metrics={"accuracy": 0.5})
    if part == "forever" or part.startswith("SIG"):
        if part != "forever":
            os.kill(os.getpid(), signal.Signals[part])
        if not stopped.wait(DEADLINE):
            raise TimeoutError("nobody stopped this job")
        master.update(phase="stopped", reason="interrupted")
        return
    master.update(phase="succeeded", metrics={"accuracy": 0.5})


class PlayedMaster:
    """In place of `elasticdl.master.shell.serve.Master`."""

    def __init__(self, spec: JobSpec, job: JobDir, make_launcher: object) -> None:
        self._part = spec.model_def
        self._job = job
        self._stopped = threading.Event()
        self.is_up = asyncio.Event()
        if self._part == "refuses":
            raise UserError("--port 80: the port is taken; choose another")

    def post(self, event: object) -> None:
        """That it is to stop."""
        if self._part != "stubborn":
            self._stopped.set()

    async def run(self) -> None:
        if self._part == "slow":
            self._job.journal.touch()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(DEADLINE)
        master = FakeMaster(self._job.name)
        master.at_stop = self._stopped.set
        with serving(master) as address:
            address.write(self._job.master)
            self.is_up.set()
            if self._part == "vanishes":
                raise RuntimeError("last words")
            if self._part == "stubborn":
                await asyncio.to_thread(master.wait_for_watcher)
                while True:  # as a person does who is not heard
                    os.kill(os.getpid(), signal.SIGINT)
                    await asyncio.sleep(2 * FINGER_SECONDS)
            await asyncio.to_thread(self._play, master)
            last = master.end()
        write_aside(self._job.status, json_format.MessageToJson(last))
        self._job.master.unlink()

    def _play(self, master: FakeMaster) -> None:
        master.wait_for_watcher()
        self._job.worker_out(0).write_text("printed by worker 0\n")
        with self._job.journal.open("a") as journal:
            play(master, journal, self._part, self._stopped)
