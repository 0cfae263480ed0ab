"""What workers tell each other while they make a step is the same on all, and right, whoever is lost meanwhile."""

import threading
import time

import pytest
import torch
from elastic_kit import Board, PlainScript, SumOfThreads, in_threads
from session_kit import enter, lose_world
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from elasticdl.elastic.core import protocol as p
from elasticdl.elastic.core.protocol import Member as InWorld
from elasticdl.elastic.core.protocol import World, WorldBroken

WORKERS = 3


class Killed(BaseException):
    """The last worker is."""


class Deadly(Board):
    """A world whose last worker dies in the collective of this number and name, and the board of the next world."""

    def __init__(self, name="", number=0, late=()):
        """``late``: ranks that lose the sum, which the others have had."""
        super().__init__(WORKERS)
        self.name, self.number, self.late = name, number, late
        self.next = Board(WORKERS - 1)
        self.is_broken = False


class Mortal(SumOfThreads):
    """Of a worker that may die, or lose the others."""

    counted = 0

    def sum_(self, tensors, name):
        board = self._board
        if not isinstance(board, Deadly):
            super().sum_(tensors, name)
            return
        if board.is_broken:
            raise WorldBroken("a worker was lost")
        dies = False
        if name == board.name:
            self.counted += 1
            dies = self.counted == board.number
        try:
            if dies and self.world.rank == WORKERS - 1:
                if board.late:
                    super().sum_(tensors, name)
                while not board.late and board.barrier.n_waiting < WORKERS - 1:
                    time.sleep(0)  # until the others are in it, too: they have had the last one
                board.is_broken = True
                board.barrier.abort()
                raise Killed
            super().sum_(tensors, name)
        except threading.BrokenBarrierError:
            raise WorldBroken("a worker was lost") from None
        if dies and self.world.rank in board.late:
            raise WorldBroken("a worker was lost")


class Worker:
    """A plain loop; ``board``: None for one device."""

    def __init__(self, rank=0, board=None):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0, factor=0.5)
        x = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
        noise = torch.randn(60, 1, generator=torch.Generator().manual_seed(2))
        self.loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True) + 3 * noise), batch_size=12)
        self.mean, self.host, self.warnings = lambda value: torch.as_tensor(value).item(), None, []
        if board is not None:
            self._prepare(rank, board)

    def _prepare(self, rank, board):
        values = {"scheduler": self.scheduler}
        script = PlainScript(rank, board, self.model, self.optimizer, self.loader, values, kind=Mortal)
        self.loader, self.host, self.mean, context = script.loader, script.host, script.host.mean, script.context
        context.warn = self.warnings.append

        def change_world(state, why):
            collective = context.collective
            lose_world(context)
            members = tuple(InWorld(i, "h", state.step, True) for i in range(board.next.size))
            version = context.session.core.world.version + 1
            collective._board, collective.world = board.next, World.of(version, members, rank)
            enter(context, collective.world)
            state.sync(collective.world)
            for part in p.SaveScope:
                state.save(part)

        context.change_world = change_world

    def train(self, loop):
        """What the loop was told of each batch, and what it has trained; None if it was killed."""
        told = {}
        try:
            for number, (x, y) in enumerate(self.loader):
                batch = number if self.host is None else self.host._last.batch.number
                self.optimizer.zero_grad()
                found = loop(self, x, y)
                if self.host is None or not self.host.is_idle:
                    told[batch] = found
        except Killed:
            return None
        return told, [each.detach().clone() for each in self.model.parameters()]


def stepped(worker, told, other):
    worker.optimizer.step()
    worker.scheduler.step(told)
    return told, other, worker.optimizer.param_groups[0]["lr"]


def before_backward(worker, x, y):
    output = worker.model(x)
    loss = mse_loss(output, y)
    told = worker.mean(loss)
    loss.backward()
    return stepped(worker, told, worker.mean((output - y).abs().mean()))


def of_numbers(worker, x, y):
    loss = mse_loss(worker.model(x), y)
    told = worker.mean(loss.item())
    loss.backward()
    return stepped(worker, told, worker.mean(loss))


def clipped(worker, x, y):
    """The loss is known, as the gradients are summed."""
    loss = mse_loss(worker.model(x), y)
    early = worker.mean(loss)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(worker.model.parameters(), 0.5)
    return stepped(worker, worker.mean(loss), early)


@pytest.mark.parametrize(("number", "late"), [(1, (0,)), (3, ()), (4, (1,)), (4, ())])
@pytest.mark.parametrize("loop", [before_backward, of_numbers, clipped])
def test_a_mean_before_the_step_is_that_of_the_global_batch_whoever_is_lost_in_it(loop, number, late):
    expected = Worker().train(loop)
    board = Deadly("elasticdl.asked", number, late)
    workers = [Worker(rank, board) for rank in range(WORKERS)]
    *survivors, killed = in_threads(lambda worker: worker.train(loop), workers)
    assert killed is None
    for found in survivors:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    first, other = survivors
    assert first[0] == other[0]  # to the bit: a script may decide by it


def after_the_step(worker, x, y):
    output = worker.model(x)
    mse_loss(output, y).backward()
    worker.optimizer.step()
    told = worker.mean((output - y).abs().mean())
    worker.scheduler.step(told)
    return told, worker.optimizer.param_groups[0]["lr"]


def test_a_mean_between_two_steps_that_a_worker_was_lost_in_is_warned_of_and_schedulers_go_on_alike():
    board = Deadly("elasticdl.asked", 2)
    workers = [Worker(rank, board) for rank in range(WORKERS)]
    *survivors, _ = in_threads(lambda worker: worker.train(after_the_step), workers)
    (one, weights), (other, its_weights) = survivors
    assert one[1][0] != other[1][0]
    assert [one[number] for number in (2, 3, 4)] == [other[number] for number in (2, 3, 4)]
    torch.testing.assert_close(weights, its_weights)
    for worker in workers[:2]:
        assert worker.warnings == ["an elastic.mean() after step 2 is each worker's own: a worker was lost"]
