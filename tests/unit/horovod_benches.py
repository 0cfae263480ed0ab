"""A bench of scripts of Horovod's elastic mode. Horovod's own part in C++ joins processes: the workers' threads have the job's wire in its place."""

import importlib.util
import os
import pickle
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
import torch
from front_ends import BATCH
from job_kit import Job, Line, Wire
from loop_benches import Loop
from torch.nn.functional import cross_entropy

from elasticdl.common.credentials import Token, WorkerEnvironment
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPolicy, Progress
from elasticdl.elastic.core.protocol import WorldBroken
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.horovod_scripts.patches import Patches
from elasticdl.elastic.horovod_scripts.script_worker import ScriptWorker
from elasticdl.job import messages as m

pytest.importorskip("horovod.torch.elastic.state")
ENVIRONMENT = WorkerEnvironment("127.0.0.1:1", Token("token"), 0, "job.json").to_env()


def own_module(name, patches, **others):
    """As a process imports it, patched. ``others``: what is imported in it under `horovod.common` is of this process, too."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        for each, own in others.items():
            patched.setitem(sys.modules, f"horovod.common.{each}", own)
        spec.loader.exec_module(module)
    patches.apply(module)
    return module


def link_of(session, open=list):
    """To a master of this process."""
    about = {"endpoint": SimpleNamespace(interface="lo"), "spec": SimpleNamespace(collective="auto")}
    return SimpleNamespace(session=session, open=open, close=list, **about)


@dataclass
class Process:
    """One worker's."""

    collective: Wire
    session: object
    worker: ScriptWorker
    hvd: SimpleNamespace
    progress: Progress = field(default_factory=Progress)
    policy: BatchPolicy = field(default_factory=lambda: BatchPolicy(BATCH, None))

    @property
    def world(self):
        return self.collective.world


class HorovodJob(Job):
    """In which a script imports Horovod."""

    def run(self, work):
        hook, kept = sys.excepthook, dict(os.environ)
        for name in [each for each in kept if each.startswith("HOROVOD_")]:  # which other tests have left
            del os.environ[name]
        try:
            return super().run(work)
        finally:
            for each in self.contexts.values():
                each.worker._end_told = True
                each.worker._close()
            sys.excepthook = hook
            os.environ.clear()
            os.environ.update(kept)

    def import_horovod(self):
        number, patches = self.rank(), Patches()
        wire, line = Wire(self), Line(self, number, WorkerCore(number, under_master=self.under_master))

        def open_link():
            line.session.break_collective = wire.break_world

        link = link_of(line.session, open_link)
        patches._worker = ScriptWorker(ENVIRONMENT if self.under_master else {}, lambda environment: link)
        hvd = self._functions(wire, patches, lambda: line.session.core.world)
        self.lines[number], self.contexts[number] = line, Process(wire, line.session, patches._worker, hvd)
        return hvd

    def come(self, worker, step):
        """A master tells the others of who leaves."""
        leaves = self.events.get((worker, step)) == "drained"
        try:
            super().come(worker, step)
        except WorldBroken as error:
            raise self.contexts[worker].hvd.HorovodInternalError from error
        for each in self.contexts.values() if leaves else ():
            each.session.post(p.Ordered(m.Change(each.world.version, "one leaves")))

    def _functions(self, wire, patches, world):
        """As of ``horovod.torch``."""

        class HorovodBasics:
            is_running = False

            def init(self):
                wire.start(world()) if patches._worker.takes_part else None
                self.is_running = True

            def shutdown(self):
                self.is_running = False

            def is_initialized(self):
                return self.is_running

        module = ModuleType("horovod.common.basics")
        module.HorovodBasics = HorovodBasics
        patches.apply(module)
        elastic = own_module("horovod.common.elastic", patches)
        states = own_module("horovod.torch.elastic.state", patches, elastic=elastic)
        basics = HorovodBasics()

        def moving(function):
            def moved(*arguments, **options):
                try:
                    return function(*arguments, **options)
                except WorldBroken as error:
                    raise elastic.HorovodInternalError(str(error)) from error

            return moved

        @moving
        def broadcast_object(value, root_rank=0, name=None):
            return pickle.loads(wire.broadcast_bytes(pickle.dumps(value), "object"))

        @torch.no_grad()
        def broadcast_parameters(named, root_rank):
            named = [*(named.items() if isinstance(named, dict) else named)]
            for (_, mine), its in zip(named, broadcast_object([each for _, each in named]), strict=True):
                mine.copy_(its)

        states.rank, states.broadcast_object = lambda: wire.world.rank, broadcast_object
        states.broadcast_parameters = broadcast_parameters
        states.broadcast_optimizer_state = lambda optimizer, root_rank: None

        def reset():
            basics.shutdown()
            basics.init()

        return SimpleNamespace(
            init=basics.init,
            rank=states.rank,
            size=lambda: wire.world.size,
            sum_=moving(lambda tensors: wire.sum_(tensors, "")),
            TorchState=states.TorchState,
            run=lambda train: elastic.run_fn(train, reset),
            HorovodInternalError=elastic.HorovodInternalError,
        )


class HorovodScript(Loop):
    """Divides each batch by itself, and commits each step."""

    Job = HorovodJob

    def on_reset(self, hvd): ...

    def commit(self, state):
        state.commit()

    def note(self, loss):
        super().note(loss)
        self.draw()

    def train(self, job):
        hvd = job.import_horovod()
        hvd.init()
        state = hvd.TorchState(self.model, self.optimizer, epoch=0, batch=0, calls=0)
        state.register_reset_callbacks([lambda: self.on_reset(hvd)])

        @hvd.run
        def train(state):
            self.model.calls = state.calls
            while state.epoch < self.script.epochs:
                for batch, (x, y) in enumerate(self.loader):
                    if batch >= state.batch:
                        job.come(job.rank(), state.calls + 1)
                        self.make_step(hvd, x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()])
                        state.batch, state.calls = batch + 1, self.model.calls
                        self.commit(state)
                state.epoch, state.batch = state.epoch + 1, 0

        train(state)

    def make_step(self, hvd, x, y):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(x), y) * (len(x) / BATCH)
        loss.backward()
        gradients = [each.grad for each in self.model.parameters()]
        *summed, mean = hvd.sum_([*gradients, loss.detach()])
        for gradient, whole in zip(gradients, summed, strict=True):
            gradient.copy_(whole)
        self.optimizer.step()
        self.note(mean.item())
