"""Benches of PyTorch's loops: that of the library, a plain one, and the small front end of CONTRIBUTING. And scripts of any plain loop."""

from __future__ import annotations

import sys
from types import MappingProxyType

import torch
from elastic_kit import make_data
from front_ends import BATCH, CLASSES, FEATURES, Refusal, Script, Trained, samples
from job_kit import Job, Lost
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.torch as elastic_api
from elasticdl.elastic.core.plan import epoch_order
from elasticdl.elastic.core.protocol import Stopped
from elasticdl.elastic.torch.prepare import PlainLoop as Prepares
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader
from elasticdl.elastic.torch_kit.torch_state import TorchState
from tests import small_front_end


class CountingNet(torch.nn.Module):
    """Two layers; what it has counted changes what comes out."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(FEATURES, 16), torch.nn.Linear(16, CLASSES)
        self.dropout, self.calls = torch.nn.Dropout(dropout), 0

    def forward(self, x):
        self.calls += 1
        return self.last(self.dropout(self.first(x).tanh())) / (1 + self.calls / 20)


def changed(kind, **functions):
    """A kind with other functions."""
    return type(kind.__name__, (kind,), functions)


def refused(kind, words, workers=(1, 2)):
    """A script of this kind of bench is."""
    return Refusal(kind.__name__, lambda: kind(Script()).train, words, workers)


class Loop:
    """What the loops share: model, optimizer, data, and what a script does behind each step."""

    runtimes = ()

    def __init__(self, script):
        self.script, self.model = script, CountingNet(script.dropout)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.data = TensorDataset(*map(torch.from_numpy, samples()))
        self.loader = DataLoader(self.data, batch_size=BATCH, shuffle=script.shuffle)
        self.losses, self.drawn = [], []

    def alone(self):
        for epoch in range(self.script.epochs):
            self.go_through(self.batches(epoch))
            self.epoch_over()

    def batches(self, epoch):
        return self.loader

    def go_through(self, batches, mean=torch.Tensor.item):
        for x, y in batches:
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.note(mean(loss))

    def note(self, loss):
        """Behind a step; None: it was not made here."""
        if loss is not None:
            self.losses.append(loss)

    def epoch_over(self): ...

    def draw(self):
        if self.script.draws:
            self.drawn.append(torch.rand(1).item())

    def trained(self):
        momenta = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        weights = [each.detach().clone().numpy() for each in (*self.model.parameters(), *momenta)]
        return Trained(weights, self.losses, self.model.calls, self.drawn)


class PlainLoop(Loop):
    """Within its loop over batches the random streams are those of a batch: the script draws its own numbers behind an epoch."""

    epoch_over = Loop.draw

    def train(self, job):
        elastic = Prepares(job)
        self.model, self.optimizer, loader = elastic.prepare(self.model, self.optimizer, self.loader)
        notes = self.script.notes
        for _ in range(self.script.epochs):
            self.go_through(loader, lambda loss: elastic.mean(loss) if notes and not elastic.catching_up() else None)
            self.epoch_over()


class StepsTwice(PlainLoop):
    def go_through(self, batches, mean):
        for x, y in batches:
            cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.optimizer.step()


PlainLoop.refusals = (refused(StepsTwice, "without a batch from the loader"),)


class LibraryLoop(Loop):
    """Its random streams are those of a batch everywhere. ``values``: that its state holds."""

    values = MappingProxyType({})

    def batches(self, epoch):
        order = epoch_order(len(self.data), 0, epoch, shuffle=self.script.shuffle)
        return [self.data[order[start : start + BATCH]] for start in range(0, len(order), BATCH)]

    def train(self, job):
        context = job.init_in_place(BATCH)
        loader = ElasticDataLoader(context, self.data, shuffle=self.script.shuffle)
        self.state = TorchState(context, self.model, self.optimizer, loader, dict(self.values))
        try:
            context.run(lambda: self.make_epochs(loader), self.state)
        except Stopped:
            sys.exit(0)  # as below `elastic.run`

    def make_epochs(self, loader):
        for _ in loader.epochs(self.script.epochs):
            for batch in loader:
                for x, y in batch:
                    batch.backward(cross_entropy(self.model(x), y))
                self.optimizer.step()
                self.note(self.state.loss)
                self.state.commit()


class PastTheBatch(LibraryLoop):
    def make_epochs(self, loader):
        for batch in loader:
            for x, y in batch:
                cross_entropy(self.model(x), y).backward()
            self.optimizer.step()


LibraryLoop.refusals = (refused(PastTheBatch, r"otherwise than by batch.backward\(loss\)"),)


class SmallFrontEnd(Loop):
    runtimes = ("tests.small_front_end.runtime",)

    def alone(self):
        self.run(small_front_end.Trainer)

    def train(self, job):
        self.run(small_front_end.ElasticTrainer)

    def run(self, kind):
        class Noting(kind):
            def update(trainer, loss):
                super().update(loss)
                self.note(loss)
                self.draw()

        Noting(self.model, self.optimizer, self.loader, self.script.epochs).train()


class Searching(SmallFrontEnd):
    def __init__(self, script):
        super().__init__(script)
        self.optimizer = torch.optim.LBFGS(self.model.parameters())


SmallFrontEnd.refusals = (refused(Searching, "LBFGS evaluates its closure several times"),)


# -- scripts of any plain loop, on one device or on the workers of a `Job` --

BATCHES = 9
TORN = 2  # steps are made before


class ScaledNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        self.register_buffer("temperature", torch.ones(()))
        self.alpha, self.calls = 1.0, 0

    def forward(self, x):
        self.calls += 1
        out = self.body(x) * self.alpha / self.temperature / (1 + self.calls / 100)
        return out * 4 if self.training else out


def each_batch(text, steps=True):
    """A loop that does with each batch what the text says, and then steps. It may name ``script``, its ``model``, ``optimizer`` and ``step``, and of the
    batch ``x``, ``y``, ``number`` and ``loss()``."""
    code = compile(text, __file__, "exec")

    def loop(script):
        named = {name: getattr(torch, name) for name in ("autograd", "no_grad", "stack", "ones_like", "zeros")}
        named |= {**vars(torch.nn.functional), "torch": torch}
        for number, (x, y) in enumerate(script.loader):
            batch = {"script": script, "model": script.model, "optimizer": script.optimizer, "step": script.step}
            batch |= {"x": x, "y": y, "number": number, "loss": lambda x=x, y=y: script.loss(x, y)}
            exec(code, named | batch)
            if steps:
                script.step()

    return loop


class PlainScript:
    """``loop(script)``: what it does with its ``loader``. ``make``: of its model, otherwise `ScaledNet`.

    ``others``: given to `prepare` as well. ``start``: with which epoch the loop begins, as the script has read a checkpoint of its own.
    """

    job = elastic = worker = start = None
    others, made = (), 0  # steps

    def __init__(self, loop, make=ScaledNet, samples=BATCH * BATCHES, batch=BATCH):
        torch.manual_seed(0)
        self.loop, self.model, self.head = loop, make(), torch.nn.Linear(3, 3)
        self.optimizers = self.make_optimizers()
        self.loader = DataLoader(make_data(samples), batch_size=batch)
        self.values = elastic_api.values(steps=0)
        self.counter, self.table, self.seen = torch.zeros(()), torch.zeros(4, 3), []

    def make_optimizers(self):
        trained = [*self.model.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.1)]

    @property
    def optimizer(self):
        return self.optimizers[0]

    @property
    def host(self):
        return self.elastic._host

    def alone(self):
        self.loop(self)
        return self

    def train(self, job):
        self.job, self.worker, self.elastic = job, job.rank(), Prepares(job)
        first, *others = self.optimizers
        given = (self.model, first, self.loader, self.values, self.head, *others, *self.others)
        _, self.optimizers[0], self.loader, *_ = self.elastic.prepare(*given, start_epoch=self.start)
        self.begun()
        self.loop(self)

    def begun(self):
        """On a worker: the loop comes next."""

    def loss(self, x, y):
        return cross_entropy(self.model(x), y)

    def mean(self, value):
        return value.item() if self.elastic is None else self.elastic.mean(value)

    def step(self):
        for each in self.optimizers:
            each.step()
        for each in self.optimizers:
            each.zero_grad()
        self.made += 1

    @property
    def found(self):
        tensors = [*self.model.state_dict().values(), *self.head.state_dict().values(), self.counter, self.table]
        flags = [each.requires_grad for each in self.model.parameters()]
        others = self.model.training, flags, self.values.state_dict(), self.seen
        return [each.detach().clone() for each in tensors], others


class TwoOptimizers(PlainScript):
    """A body that steps on each batch, and a head that steps more rarely."""

    def make_optimizers(self):
        head = torch.optim.SGD([*self.model.body[2].parameters(), *self.head.parameters()], lr=0.1, momentum=0.5)
        return [torch.optim.AdamW(self.model.body[0].parameters(), lr=0.02), head]


def run(loop, workers=2, *, loses=False, kind=PlainScript, under_master=True, **options):
    """The scripts of the workers that are not lost, and what each of all workers has said. ``loses``: worker 1, once some steps are made."""
    job = Job(workers, {(1, TORN + 1): "lost"} if loses else (), under_master=under_master)
    scripts = [kind(loop, **options) for _ in range(workers)]
    said, _ = job.run(lambda worker: scripts[worker].train(job))
    return [each for each, word in zip(scripts, said, strict=True) if not isinstance(word, Lost)], said


def compare(loop, workers=2, *, loses=False, kind=PlainScript, **options):
    """All that are left have what the script has made on one device. They are returned."""
    tensors, others = kind(loop, **options).alone().found
    left, said = run(loop, workers, loses=loses, kind=kind, **options)
    for each in left:
        assert said[each.worker] is None, said
        found, more = each.found
        torch.testing.assert_close(found, tensors, rtol=1e-4, atol=1e-5)
        assert more == others
    return left
