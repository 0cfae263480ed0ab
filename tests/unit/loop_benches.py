"""Benches of PyTorch's loops: that of the library, a plain one, and the small front end of CONTRIBUTING."""

from __future__ import annotations

import sys
from types import MappingProxyType

import torch
from front_ends import BATCH, CLASSES, FEATURES, Refusal, Script, Trained, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

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
