"""What tests of front ends with a trainer share: workers in the threads of one process, each with a trainer of its own.

No state is sent when they join, and all threads draw from the same random streams. So make the trainers one after the other, from the
same seed, before `JobOfThreads.run`, and let training draw nothing.
"""

from __future__ import annotations

import threading

import torch
from elastic_kit import Board, SumOfThreads, in_threads
from session_kit import FakeMaster, enter
from torch.utils.data import TensorDataset

from elasticdl.common.errors import UserError
from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.worker import WorkerCore
from elasticdl.elastic.torch_kit.torch_job import ElasticContext


def make_data(samples):
    pixels = torch.randn(samples, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(pixels, pixels[:, :3].argmax(1))


class JobOfThreads:
    """In place of what knows this process's job: each thread is a worker of a world of so many."""

    def __init__(self, workers):
        self._board = Board(workers)
        self._own = threading.local()
        self.told = []  # for the journal

    def rank(self):
        return getattr(self._own, "rank", 0)

    def init_in_place(self, global_batch_size):
        rank = self._own.rank
        collective = SumOfThreads(rank, self._board)
        session = FakeMaster(core=WorkerCore(rank)).session
        context = ElasticContext(session, collective, BatchPolicy(global_batch_size, None), seed=0)
        context.check_state, context.warn = "epoch", self.told.append
        session.jobs_place = lambda: (0, 0)

        def join(state):
            context._ask_for_world(state)
            enter(context, collective.world)
            for part in p.SaveScope:
                state.save(part)

        context.join = join
        return context

    def train_in_place(self, finish):
        self._own.finish = finish

    def leave(self): ...

    def run(self, work):
        """``work(rank)`` on each worker, and the end of its script: the error that each has raised, or None; what it returned."""

        def run(rank):
            self._own.rank = rank
            try:
                made = work(rank)
                self._own.finish()
            except UserError as error:
                return error, None
            return None, made

        return tuple(zip(*in_threads(run, range(self._board.size)), strict=True))
