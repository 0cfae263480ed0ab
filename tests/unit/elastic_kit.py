"""What the tests of elastic training share, and of PyTorch's twin: workers in the threads of one process."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from session_kit import FakeMaster, enter
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.elastic.collectives.port import Collective, Transfer
from elasticdl.elastic.core.plan import epoch_order
from elasticdl.elastic.core.protocol import Member, World
from elasticdl.elastic.torch_kit.loaders import ElasticDataLoader, ElasticSampler
from elasticdl.elastic.torch_kit.tensors import ElasticContext, TorchTensors
from elasticdl.elastic.torch_kit.torch_state import TorchState


def make_model(batch_norm=False):
    torch.manual_seed(0)
    middle = [torch.nn.BatchNorm1d(16)] if batch_norm else []
    return torch.nn.Sequential(torch.nn.Linear(8, 16), *middle, torch.nn.ReLU(), torch.nn.Linear(16, 3))


def make_data(samples=50):
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


class Board:
    """Where the threads leave what is to be summed."""

    def __init__(self, size):
        self.size = size
        self.slots = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait()
        slots = list(self.slots)
        # Whoever is lost by now has given its own: to the others this exchange was the last.
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait()
        return slots


class SumOfThreads(Collective):
    """A world of several workers in the threads of one process: sums are real, only the wire is missing."""

    def __init__(self, rank, board, tensors=None):
        super().__init__(tensors or TorchTensors())
        self.board = board
        self.world = World.of(1, tuple(Member(i, "h", 0, False) for i in range(board.size)), rank)

    def sum_(self, tensors, name):
        lent = [self.tensors.lend(tensor, natively=True) + 0 for tensor in tensors]
        slots = self.board.exchange(self.world.rank, lent)
        return [self._summed(tensor, sum(given)) for tensor, *given in zip(tensors, *slots, strict=True)]

    def begin_sum(self, tensor, name):
        return Transfer(tensor)

    def finish(self, transfers):
        return self.sum_([transfer.tensor for transfer in transfers], "")

    def broadcast_array(self, array, name):
        return self.board.exchange(self.world.rank, array.copy())[0]

    def exchange(self, array, sent, received, name):
        rank = self.world.rank
        slots = self.board.exchange(rank, (array.copy(), sent))
        return np.concatenate([np.split(given, np.cumsum(sizes)[:-1])[rank] for given, sizes in slots])


def in_threads(work, members):
    """``work(member)`` for all at once; the first error is raised."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(work, members, timeout=120))


class Trainee:
    """One worker's context, model and state on a board; ``own_loader``: options of a loader of torch's, to use that; without
    ``joins`` it is yet to ask for the board's world."""

    def __init__(
        self,
        rank,
        board,
        policy,
        batch_norm=False,
        own_loader=None,
        drop_last=False,
        joins=True,
        session=None,
        check_state="epoch",
        values=None,
        model=None,
        data=None,
    ):
        collective = SumOfThreads(rank, board)
        self.context = ElasticContext(session or FakeMaster().session, collective, policy, seed=0)
        self.context.check_state = check_state
        self.model = model or make_model(batch_norm)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        data = data or make_data(48 if batch_norm else 50)
        if own_loader is None:
            self.loader = given = ElasticDataLoader(self.context, data, drop_last=drop_last)
            self.sampler = self.loader.sampler
        else:
            self.sampler = given = ElasticSampler(self.context, data, drop_last=drop_last)
            self.loader = DataLoader(data, batch_sampler=self.sampler, **own_loader)
        values = values(self) if values else {}
        self.state = TorchState(self.context, self.model, self.optimizer, given, values)
        self.losses = []
        if joins:
            enter(self.context, collective.world)

    def steps(self):
        return self.sampler.steps(self.loader) if isinstance(self.loader, DataLoader) else iter(self.loader)

    def weights(self):
        return [each.tolist() for each in self.model.state_dict().values()]

    def make_step(self, batch):
        for inputs, labels in batch:
            batch.backward(cross_entropy(self.model(inputs), labels))
        self.optimizer.step()

    def train(self, epochs=1):
        for _ in self.sampler.epochs(epochs):
            for batch in self.steps():
                self.make_step(batch)
                self.losses.append(self.state.loss)
                self.state.commit()


def on_one_device(model, data, batch, epochs=2, drop_last=False):
    """Trains without any of this: one process, whole batches. The losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        order = epoch_order(len(data), 0, epoch)
        for start in range(0, len(data) // batch * batch if drop_last else len(data), batch):
            inputs, labels = data[order[start : start + batch]]
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses
