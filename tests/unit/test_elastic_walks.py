"""docs/worker_side.md, whose lists a traced step writes: the files that it crosses, in the order in which they come in.

Two workers in the threads of one process make it; only the torn step is that of a worker alone. The engine is a stand-in.
"""

import contextlib
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from elastic_fit_kit import Fitting, data_of, dense, fit_together, numbers
from elastic_kit import Board, PlainScript, Trainee, in_threads, make_model
from front_end_kit import be_alone, be_torn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from trainers_kit import Module, make_data, process_is_kept, run_trainers  # noqa: F401  a fixture

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.transformers import Trainer
from tests.walks import REPOSITORY, require_written

PACKAGE = f"{REPOSITORY}/elasticdl/"
DOCUMENT = REPOSITORY / "docs" / "worker_side.md"
STEP = 3  # that is traced
# So many files may be crossed. Somebody has to read them.
MOST = {"library": 14, "plain": 18, "torn": 24, "lightning": 19, "transformers": 18, "keras": 13}


class Trace:
    """Of one thread, from `begin` to `end`, each of which counts only once."""

    def __init__(self):
        self.files = {}

    def begin(self):
        if not self.files:
            sys.setprofile(self._note)

    def end(self):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(PACKAGE):
            self.files[path.removeprefix(PACKAGE)] = True

    @contextlib.contextmanager
    def step(self, number):
        """Around each step of one worker: of these the one with the number is traced."""
        if number == STEP:
            self.begin()
        try:
            yield
        finally:
            self.end()

    def between(self, number):
        """Where a step begins whose end is where the next one begins."""
        self.begin() if number == STEP else self.end()


def library(trace, monkeypatch, _):
    # Hooks on all optimizers of the process, which plain loops of other tests have left.
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_pre_hooks", OrderedDict())
    board = Board(2)
    members = [Trainee(rank, board, BatchPolicy(8, None)) for rank in range(2)]

    def train(member):
        for _ in member.sampler.epochs(1):
            steps = member.steps()
            for number in range(1, 6):
                with trace.step(number if member is members[0] else 0):
                    member.make_step(next(steps))
                    member.state.commit()

    in_threads(train, members)


def plain(trace, *_):
    board = Board(2)

    def train(rank):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        script = PlainScript(rank, board, model, optimizer, DataLoader(make_data(48), batch_size=8))
        batches = iter(script.loader)
        for number in range(1, 6):
            with trace.step(0 if rank else number):
                x, y = next(batches)
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()

    in_threads(train, range(2))


def torn(trace, monkeypatch, _):
    """From `optimizer.step()` on."""

    def train():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        script = PlainScript(0, Board(1), model, optimizer, DataLoader(make_data(48), batch_size=8))
        script.context.change_world = lambda state, why: be_alone(script.context)
        for number, (x, y) in enumerate(script.loader, start=1):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            with trace.step(number):
                optimizer.step()

    be_torn(monkeypatch, STEP, train)


def lightning(trace, monkeypatch, folder):
    run_trainers(noting(Module, trace), folder, monkeypatch, samples=48)


def transformers(trace, monkeypatch, folder):
    run_trainers(noting(Trainer, trace), folder, monkeypatch, samples=48)


def noting(kind, trace):
    """A trainer's class. In the thread that comes first a step is traced from its forward pass to that of the next."""
    passes = {}

    class Noting(kind):
        def training_step(self, *args, **kwargs):
            mine = passes.setdefault(threading.get_ident(), [])
            mine.append(True)
            if next(iter(passes)) == threading.get_ident():
                trace.between(len(mine))
            return super().training_step(*args, **kwargs)

    return Noting


def keras_fit(trace, *_):
    class Noting(Fitting):
        rank = 0

        def train(self, until=None):
            self.fit._after_commit = lambda: None if self.rank else trace.between(self.fit.state.step + 1)
            self.fit.train()

    def make(rank):
        member = Noting(dense(), data_of(*numbers()))
        member.rank = rank
        return member

    fit_together(2, make)


WALKS = {
    "library": library,
    "plain": plain,
    "torn": torn,
    "lightning": lightning,
    "transformers": transformers,
    "keras": keras_fit,
}


@pytest.mark.parametrize("walk", WALKS)
def test_a_step_crosses_few_files_and_the_document_names_them(walk, monkeypatch, tmp_path):
    trace = Trace()
    WALKS[walk](trace, monkeypatch, tmp_path)
    require_written(DOCUMENT, walk, list(trace.files))
    assert len(trace.files) <= MOST[walk]
