"""A script with a plain loop, on one device or on one worker of a `Job`."""

from __future__ import annotations

import functools

import torch
from job_kit import Job, Lost
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.torch as elastic_api
from elasticdl.elastic.torch.prepare import PlainLoop

BATCH, BATCHES = 8, 9
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


@functools.cache
def _compiled(text):
    return compile(text, __file__, "exec")


def each_batch(text, steps=True):
    """A loop that does with each batch what the text says, and then steps. It may name ``script``, its ``model``, ``optimizer`` and ``step``, and of the
    batch ``x``, ``y``, ``number`` and ``loss()``."""

    def loop(script):
        named = {name: getattr(torch, name) for name in ("autograd", "no_grad", "stack", "ones_like", "zeros")}
        named |= {**vars(torch.nn.functional), "torch": torch}
        for number, (x, y) in enumerate(script.loader):
            batch = {"script": script, "model": script.model, "optimizer": script.optimizer, "step": script.step}
            batch |= {"x": x, "y": y, "number": number, "loss": lambda x=x, y=y: script.loss(x, y)}
            exec(_compiled(text), named | batch)
            if steps:
                script.step()

    return loop


class PlainScript:
    """``loop(script)``: what it does with its ``loader``. ``make``: of its model, otherwise `ScaledNet`."""

    def __init__(self, loop, make=ScaledNet, samples=BATCH * BATCHES, batch=BATCH):
        torch.manual_seed(0)
        self.loop, self.model, self.head = loop, make(), torch.nn.Linear(3, 3)
        self.optimizers = self.make_optimizers()
        x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
        self.loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=batch)
        self.values = elastic_api.values(steps=0)
        self.counter, self.table, self.seen = torch.zeros(()), torch.zeros(4, 3), []
        self.job = self.elastic = self.worker = None
        self.made = 0  # steps
        self.others = []  # given to `prepare` as well
        self.start = None  # with which epoch the loop begins, as the script has read a checkpoint of its own
        self.loses = False

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
        self.job, self.worker, self.elastic = job, job.rank(), PlainLoop(job)
        first, *others = self.optimizers
        given = (self.model, first, self.loader, self.values, self.head, *others, *self.others)
        _, _, self.loader, *_ = self.elastic.prepare(*given, start_epoch=self.start)
        self.begun()
        self.loop(self)

    def begun(self):
        """On a worker: the loop comes next."""

    def loss(self, x, y):
        return cross_entropy(self.model(x), y)

    def lose(self):
        """Where a worker may be lost: the second one is, once some steps are made."""
        if self.loses and self.worker == 1 and self.made >= TORN:
            self.job.lose()

    def mean(self, value):
        self.lose()
        return value.item() if self.elastic is None else self.elastic.mean(value)

    def step(self, *optimizers):
        self.lose()
        for each in optimizers or self.optimizers:
            each.step()
        self.made += 1
        assert self.elastic is None or not self.elastic.catching_up(), "it has come later, and this one has not"
        for each in self.optimizers:
            each.zero_grad()

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
    """The scripts of the workers that are not lost, and what each of all workers has said."""
    job = Job(workers, under_master=under_master)
    scripts = [kind(loop, **options) for _ in range(workers)]
    for each in scripts:
        each.loses = loses
    said, _ = job.run(lambda worker: scripts[worker].train(job))
    return [each for each, word in zip(scripts, said, strict=True) if not isinstance(word, Lost)], said


def compare(loop, workers=2, *, loses=False, kind=PlainScript, **options):
    """All that are left have what the script has made on one device. They are returned."""
    tensors, others = kind(loop, **options).alone().found
    left, said = run(loop, workers, loses=loses, kind=kind, **options)
    assert len(left) == workers - loses, said
    for each in left:
        assert said[each.worker] is None, said
        found, more = each.found
        torch.testing.assert_close(found, tensors, rtol=1e-4, atol=1e-5)
        assert more == others
    return left
