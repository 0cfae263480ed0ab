"""Batches that a plain loop leaves out, looks at without training, or fetches ahead."""

import contextlib
import itertools
import queue
import subprocess
import sys
import threading

import pytest
import torch
from elastic_kit import Board, PlainScript, in_threads
from refusal_kit import refused
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class Member:
    def __init__(self, rank=None, board=None):
        torch.manual_seed(0)
        self.seen = []
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
        self.loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=BATCH)
        if board is not None:
            self.script = PlainScript(rank, board, self.model, self.optimizer, self.loader)
            self.loader = self.script.loader

    def train(self, x, y):
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    @property
    def weights(self):
        return [each.detach().clone() for each in self.model.parameters()]


def skips_what_is_not_full(member):
    for x, y in member.loader:
        if x.size(0) != BATCH:
            continue
        member.train(x, y)


def skips_by_length(member):
    for x, y in member.loader:
        inputs = x.float()
        if len(inputs) < BATCH:
            continue
        member.train(inputs, y)


def skips_by_shape(member):
    for x, y in member.loader:
        if x.shape[0] == BATCH:
            member.train(x, y)


class Prefetcher:
    def __init__(self, loader, change=lambda x: x):
        self.batches, self.change = iter(loader), change
        self.load()

    def load(self):
        self.next = None
        for x, y in self.batches:
            self.next = self.change(x), y
            return

    def __iter__(self):
        while self.next is not None:
            batch = self.next
            self.load()
            yield batch


def fetches_ahead(member):
    for x, y in Prefetcher(member.loader):
        member.train(x, y)


def fetches_ahead_and_converts(member):
    for x, y in Prefetcher(member.loader, torch.Tensor.double):
        member.train(x.float(), y)


def keeps_an_epoch(member):
    for x, y in list(member.loader):
        member.train(x, y)


def repeats_by_itertools(member):
    for x, y in itertools.islice(itertools.cycle(member.loader), 2 * len(member.loader)):
        member.train(x, y)


def trains_on_one_batch(member):
    x, y = next(iter(member.loader))
    member.train(x, y)


def makes_a_loader_anew(member):
    for _ in range(2):
        for x, y in member.loader:
            member.train(x, y)
        member.loader = DataLoader(member.loader.dataset, batch_size=8)


OF_THE_SIZE = r"test_elastic_loop_turns\.py:.* this worker's part has 4 of its 8 samples.*drop_last=True"
AHEAD = r"test_elastic_loop_turns\.py:.* works on a batch after the next one was given, as with a prefetcher"
OUTSIDE = (keeps_an_epoch, repeats_by_itertools, trains_on_one_batch, makes_a_loader_anew)
KEPT = "outside of the loop over the prepared loader, as on next\\(iter\\(loader\\)\\)"


@pytest.mark.parametrize(
    ("loop", "workers", "words"),
    [
        *((each, 2, OF_THE_SIZE) for each in (skips_what_is_not_full, skips_by_length, skips_by_shape)),
        *((fetches_ahead, workers, AHEAD) for workers in (1, 2)),
        (fetches_ahead_and_converts, 2, AHEAD),
        *((each, workers, KEPT) for each in OUTSIDE for workers in (1, 2)),
    ],
)
def test_a_batch_that_is_left_out_by_its_size_or_fetched_ahead_is_refused_by_all_in_one_line(loop, workers, words):
    board = Board(workers)
    members = [Member(rank, board) for rank in range(workers)]
    in_threads(lambda member: refused(words, lambda: loop(member)), members)


def test_to_fetch_in_another_thread_is_refused():
    member, batches = Member(0, Board(1)), queue.Queue(1)
    thread = threading.Thread(target=lambda: [batches.put(each) for each in member.loader], daemon=True)
    thread.start()
    x, y = batches.get(timeout=30)
    refused("looped over in another thread than the one that trains, as by a background", lambda: member.train(x, y))
    while thread.is_alive():
        with contextlib.suppress(queue.Empty):
            batches.get(timeout=0.01)


def looks_first(member):
    x, _ = next(iter(member.loader))
    assert x.shape[1] == 8
    for number, (x, y) in enumerate(member.loader):
        if number == 0:
            assert len(x)
        member.train(x, y)


def looks_at_how_good_it_is(member):
    count = 0
    with torch.no_grad():
        for x, y in member.loader:
            member.model(x)
            count += len(y)
    for x, y in member.loader:
        member.train(x, y)


def averages_statistics(member):
    """By the recipe of `torch.optim.swa_utils`, and an evaluation before all steps, between them and after them."""
    averaged = torch.nn.Sequential(torch.nn.BatchNorm1d(8))

    @torch.no_grad()
    def evaluate():
        member.seen.append([len(x) for x, _ in member.loader])

    evaluate()
    for number, (x, y) in enumerate(member.loader):
        member.train(x, y)
        if number == 2:
            evaluate()
    update_bn(member.loader, averaged)
    evaluate()
    return averaged.state_dict()


def test_a_pass_with_gradients_off_is_given_whole_batches():
    alone = Member()
    expected = averages_statistics(alone)
    board = Board(2)
    members = [Member(rank, board) for rank in range(2)]
    for made in in_threads(averages_statistics, members):
        torch.testing.assert_close(made, expected, rtol=0, atol=0)
    for member in members:
        assert member.seen == alone.seen
        torch.testing.assert_close(member.weights, alone.weights, rtol=1e-4, atol=1e-5)
        assert member.script.host.participant.state.progress.epoch == 0


def leaves_some_out(member):
    kept = None
    for number, (x, y) in enumerate(member.loader):
        if number % 2 == 0:
            kept = x
            continue
        with torch.no_grad():
            assert (x - kept).shape == x.shape  # of both
        member.train(x, y)


@pytest.mark.parametrize(
    ("loop", "workers", "positions"),
    [
        *((looks_first, workers, [8, 16, 24, 32, 40, 48]) for workers in (1, 3)),
        *((leaves_some_out, workers, [8, 16, 24]) for workers in (1, 3)),
        (looks_at_how_good_it_is, 2, None),
        (skips_what_is_not_full, 1, None),
    ],
)
def test_a_batch_of_which_nothing_is_made_is_no_part_of_a_step(loop, workers, positions):
    alone = Member()
    loop(alone)
    board = Board(workers)

    def run(member):
        found, close = [], member.script.host._gradients.close_step
        member.script.host._gradients.close_step = lambda: (
            close() or found.append(member.script.host.participant.state.progress.samples)
        )
        loop(member)
        return member.weights, found

    for weights, found in in_threads(run, [Member(rank, board) for rank in range(workers)]):
        torch.testing.assert_close(weights, alone.weights, rtol=1e-4, atol=1e-5)
        assert found == (positions or found)


def test_a_loop_that_has_made_no_step_of_its_batches_does_not_succeed():
    member = Member(0, Board(1))
    for _ in member.loader:
        pass
    state = member.script.host.participant.state
    refused("training has ended without a step, though its loop was given batches", state.require_steps)
    for x, y in member.loader:
        member.train(x, y)
    state.require_steps()


STEPS = """
import torch
from torch.utils.data import DataLoader
import elasticdl.elastic.torch as elastic
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = elastic.prepare(model, optimizer, DataLoader(torch.ones(8, 1), batch_size=2))
batches = iter(loader)
model(next(batches)).mean().backward()
optimizer.step()
"""


def test_a_loop_that_is_left_open_says_nothing_at_exit():
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stderr) == (0, "")
