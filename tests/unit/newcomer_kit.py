"""A made-up worker with a plain loop, which may come later and find a state."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from elastic_kit import Board, PlainScript
from session_kit import receive
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import elasticdl.elastic.torch as elastic

EPOCHS, BATCHES, STANDS = 3, 4, (1, 2)


def make_data(samples=60):
    pixels = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pixels, pixels[:, :3].argmax(1))


class Experts(torch.nn.Module):
    """Leaves in an attribute what its loss has a term of."""

    def __init__(self):
        super().__init__()
        self.gate, self.out = torch.nn.Linear(8, 4), torch.nn.Linear(4, 3)

    def forward(self, x):
        shares = self.gate(x).softmax(1)
        self.balance = shares.square().sum(1).mean()
        return self.out(shares)


class Member:
    """A script in a job of one worker. ``join(state)``: what it finds in its first world. ``stands``: where it was told that the job does."""

    def __init__(self, make_model=Experts, stands=(0, 0), join=None, before=None, start=None, **options):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        if before:
            before(self)
        self.plain = DataLoader(make_data(), batch_size=15, **(options or {"shuffle": True}))
        self.values = elastic.values(history=())  # as `elastic.prepare` is given it
        values = {"prepared_0": self.values}
        script = PlainScript(0, Board(1), self.model, self.optimizer, self.plain, values=values, start=start)
        self.loader, self.host, self.job = script.loader, script.host, script.context
        self.job.session.jobs_place = lambda: stands
        self.kept, self.orders, self.passed, self.joined_at = [], {}, 0, None
        real = self.job.join

        def joined(state):
            self.joined_at = self.passed
            real(state)
            if join is not None:
                receive(state, join)

        self.job.join = joined

    def step(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.passed += 1
        if not self.host.is_idle:
            self.kept.append(copy.deepcopy(self.host.participant.state.sent()))
            drawn = self.host._order.drawn
            self.orders[drawn[0].epoch] = [batch.indices for batch in drawn]


def plain_loss(member, x, y):
    return cross_entropy(member.model(x), y)


def train(member, loss_of=plain_loss, after=lambda member: None, epochs=range(EPOCHS)):
    for _ in epochs:
        for x, y in member.loader:
            member.step(loss_of(member, x, y))
        after(member)


def late_of(member, stands=STANDS, **options):
    """A newcomer that finds what the job was after the second batch of the second epoch."""
    return Member(stands=stands, join=member.kept[STANDS[0] * BATCHES + STANDS[1]], **options)
