"""Processes that are members of worlds, and do what a test tells them; the test stands for the master and the sessions."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from elasticdl.elastic.collectives.opening import open_collective
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.elastic.link.store import Endpoint, KvStore

DEADLINE = 60.0
ENGINES = ("horovod", "torch")
KERAS_ENGINES = ("keras-horovod", "keras-torch")
CONTEXT = multiprocessing.get_context("forkserver")
# All that a member imports, and once: what is missing here each member imports anew, for a second and more.
CONTEXT.set_forkserver_preload(
    [
        "grpc",
        "elasticdl.tensorflow",
        "horovod.torch",
        "horovod.tensorflow",
        "elasticdl.elastic.collectives.torch_distributed",
        "elasticdl.elastic.torch_kit.tensors",
        "elasticdl.elastic.keras.tensorflow_adapter",
        __name__,
    ]
)


class MemberEnded(Exception):
    """Of a member whose result is awaited."""


def tensors_of(engine: str) -> Any:
    if engine in KERAS_ENGINES:
        from elasticdl.elastic.keras.tensorflow_adapter import TensorFlowTensors

        return TensorFlowTensors()
    from elasticdl.elastic.torch_kit.tensors import TorchTensors

    return TorchTensors()


class Program:
    """What a member can be told to do. Its main thread does one thing after another; entries and breaks come in between."""

    def __init__(self, pipe: Connection, engine: str) -> None:
        self._pipe = pipe
        self._sending = threading.Lock()
        self._todo: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.store = KvStore(lambda *entry: self._send("entry", entry))
        endpoint = Endpoint(self.store, "lo")
        self.collective = open_collective(endpoint, engine.removeprefix("keras-"), tensors_of(engine))

    def run(self) -> None:
        threading.Thread(target=self._receive, daemon=True).start()
        while True:
            name, arguments = self._todo.get()
            try:
                result = getattr(self, f"do_{name}", partial(self._call, name))(*arguments)
            except Exception as error:  # noqa: BLE001  the test looks at it
                result = WorldBroken(str(error)) if isinstance(error, WorldBroken) else RuntimeError(repr(error))
            self._send("result", result)

    def _send(self, kind: str, content: Any) -> None:
        with self._sending:
            self._pipe.send((kind, content))

    def _receive(self) -> None:
        while True:
            try:
                name, arguments = self._pipe.recv()
            except EOFError:
                os._exit(0)
            if name == "entry":
                self.store.receive(*arguments)
            elif name == "break":
                self.store.break_world(*arguments)
                self.collective.break_world(*arguments)
            else:
                self._todo.put((name, arguments))

    def _call(self, name: str, *arguments: Any) -> Any:
        """What the collective does by itself."""
        named = () if name in ("stop", "last_operations") else (f"of {name}",)
        return getattr(self.collective, name)(*arguments, *named)

    # ---- what it can be told ----

    def do_start(self, world: World) -> None:
        self.store.open_world(world.version)
        self.collective.start(world)

    def do_sum(self, array: np.ndarray, name: str = "x") -> np.ndarray:
        return self.collective.sum(array, name)

    def do_sum_tensors(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Of TensorFlow's own."""
        import tensorflow as tf

        return [self.collective.sum(tf.constant(array), f"x{number}").numpy() for number, array in enumerate(arrays)]

    def do_sum_for_ever(self, elements: int) -> None:
        while True:
            self.do_sum(np.ones(elements, np.float32))

    def do_exchange(self, array: np.ndarray, sent: list[int], received: list[int]) -> np.ndarray:
        """With a sum under way meanwhile."""
        begun = self.collective.begin_sum(np.ones(3), "beside")
        result = self.collective.exchange(array, sent, received, "x")
        (total,) = self.collective.finish([begun])
        assert (total == self.collective.world.size).all()
        return result

    def do_exchange_for_ever(self, elements: int) -> None:
        """Parts of other sizes in each direction."""
        world = self.collective.world
        sent = [elements >> (rank + 2 * world.rank) % 3 for rank in range(world.size)]
        received = [elements >> (2 * rank + world.rank) % 3 for rank in range(world.size)]
        while True:
            self.collective.exchange(np.ones(sum(sent), np.uint8), sent, received, "x")

    def do_sum_as(self, dtype: str, values: list[float]) -> list[float]:
        """For types that NumPy has not."""
        import torch

        tensor = torch.tensor(values).to(getattr(torch, dtype))
        if tensor.is_complex():
            tensor *= 1j
        self.collective.sum_([tensor], "x")
        return [float(value) for value in (tensor.imag if tensor.is_complex() else tensor)]

    def do_sum_each_second(self, count: int) -> list[float]:
        import torch

        tensor = torch.ones(count)
        self.collective.sum_([tensor[::2]], "x")
        return tensor.tolist()

    def do_ask(self, number: float) -> float:
        import torch

        total = torch.tensor([number])
        self.collective.sum_asked(total, "elastic.mean()")
        return float(total)

    def do_shorten_timeouts(self, seconds: float) -> None:
        from elasticdl.elastic.collectives import torch_distributed

        torch_distributed.CONNECT_SECONDS = seconds

    def do_count(self) -> tuple[int, int, int]:
        """Threads, open files and resident kilobytes of this process."""
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * 4


def _run(pipe: Connection, engine: str) -> None:
    import torch

    torch.set_num_threads(1)
    # Gloo's own timeout is not what ends the waiting.
    os.environ.update({"HOROVOD_ELASTIC": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"})
    Program(pipe, engine).run()


class MemberProcess:
    def __init__(self, number: int, engine: str) -> None:
        self.number = number
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_run, args=(theirs, engine), daemon=True)
        self.process.start()
        theirs.close()
        self._telling = threading.Lock()
        self.results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def tell(self, name: str, *arguments: Any) -> None:
        with self._telling, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was killed
            self.pipe.send((name, arguments))

    def result(self) -> Any:
        result = self.results.get(timeout=DEADLINE)
        if isinstance(result, MemberEnded):
            self.results.put(result)  # for who asks again
            self.process.join(DEADLINE)
            raise MemberEnded(f"member {self.number} has ended (exit code {self.process.exitcode})")
        return result

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class Group:
    """Some members, whose entries reach each other."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.members: list[MemberProcess] = []
        self.version = 0

    def add(self, count: int) -> list[MemberProcess]:
        for _ in range(count):
            member = MemberProcess(len(self.members), self.engine)
            self.members.append(member)
            threading.Thread(target=self._relay, args=(member,), daemon=True).start()
        return self.members[-count:]

    def _relay(self, member: MemberProcess) -> None:
        try:
            while True:
                kind, content = member.pipe.recv()
                if kind == "result":
                    member.results.put(content)
                    continue
                for other in self.members:
                    if other is not member:
                        other.tell("entry", *content)
        except (EOFError, OSError):
            member.results.put(MemberEnded())

    def begin(self, members: list[MemberProcess]) -> None:
        """Have them enter a new world, in this order of ranks, without waiting for it."""
        self.version += 1
        made = tuple(Member(member.number, "127.0.0.1", 0, True) for member in members)
        for rank, member in enumerate(members):
            member.tell("start", World.of(self.version, made, rank))

    def form(self, members: list[MemberProcess]) -> None:
        self.begin(members)
        assert [member.result() for member in members] == [None] * len(members)

    def all(self, members: list[MemberProcess], name: str, *arguments: list[Any]) -> list[Any]:
        """Each does it, with its own arguments; returns the results by rank."""
        for rank, member in enumerate(members):
            member.tell(name, *(argument[rank] for argument in arguments))
        return [member.result() for member in members]

    def break_world(self, members: list[MemberProcess]) -> None:
        for member in members:
            member.tell("break", self.version)

    def close(self) -> None:
        for member in self.members:
            member.process.kill()
            member.process.join(DEADLINE)
            member.pipe.close()
