"""A training state is a list of pieces: what is in it is kept, undone, sent, written and compared; what is not, does not exist."""

import io
import os
from types import SimpleNamespace

import pytest
import torch
from elastic_kit import Board, Trainee, in_threads
from refusal_kit import refused

from elasticdl.callbacks import Callback
from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import SaveScope
from elasticdl.elastic.training.pieces import Piece
from elasticdl.worker.trainer import Trainer, kept_by

POLICY = BatchPolicy(20, None, 10)


class Average(Piece):
    """A piece that the project does not have: one class, and one entry in one list."""

    name, is_value, makes_model = "average", True, True

    def __init__(self):
        self.weights = torch.zeros(2)

    def dump(self):
        return {"weights": self.weights}

    def load(self, dumped):
        self.weights = dumped["weights"].clone()

    def compared(self):
        return {self.name: self.dump()}


def one(**options):
    return Trainee(0, Board(1), POLICY, values=lambda member: {"average": Average(), "seen": 0}, **options)


def keep(member):
    for scope in SaveScope:
        member.state.save(scope)


def test_a_state_names_all_that_it_holds():
    member = one()
    assert [piece.name for piece in member.state.pieces if piece.travels] == [
        *("attributes", "model", "caches", "optimizer", "average", "seen", "rate", "progress")
    ]
    assert [piece.name for piece in member.state.pieces if not piece.travels] == [
        *("moved by passes", "settings", "in hand")
    ]
    member.state.values["later"] = 1
    del member.state.values["seen"]
    assert [piece.name for piece in member.state.pieces if piece.is_value] == ["average", "later"]


def test_a_new_piece_is_kept_undone_written_and_read_with_all_others():
    member = one()
    average = member.state.values["average"]
    average.weights += 1
    keep(member)
    average.weights += 1
    member.state.restore()
    assert average.weights.tolist() == [1, 1]
    file = io.BytesIO()
    member.state.write(file)
    file.seek(0)
    other = one()
    other.state.load(other.state.unpack(file))
    assert other.state.values["average"].weights.tolist() == [1, 1]
    assert member.state.state_dict()["values"].keys() == {"average", "seen"}


def test_a_new_piece_is_compared_and_sent_with_all_others():
    board = Board(2)
    members = [Trainee(rank, board, POLICY, values=lambda _: {"average": Average()}) for rank in range(2)]
    members[1].state.values["average"].weights += 1

    def train(member):
        refused(r"average\.weights differs", member.train)
        member.state.take_over()

    in_threads(train, members)
    assert members[1].state.values["average"].weights.tolist() == [0, 0]


def test_a_value_that_came_after_the_last_commit_stays_where_a_step_is_torn():
    member = one()
    keep(member)
    later = member.state.values["later"] = torch.optim.lr_scheduler.StepLR(member.optimizer, 1)
    later.last_epoch = 7
    member.state.restore()
    assert later.last_epoch == 7


class Writes(Callback):
    def __init__(self, path):
        self.path, self.file, self.steps = str(path), None, 0

    def on_train_begin(self):
        self.file = os.open(self.path, os.O_WRONLY | os.O_CREAT)


@pytest.fixture
def made(tmp_path):
    """Two callbacks, of the first worker and of a newcomer."""
    both = [Writes(tmp_path / name) for name in "ab"]
    yield both
    for each in both:
        if each.file is not None:
            os.close(each.file)


def test_a_newcomer_keeps_its_own_file_and_has_what_the_callbacks_of_rank_0_have_counted(made):
    told, sent = [], []

    def member(callback, rank):
        world = SimpleNamespace(
            size=2, rank=rank, is_first=False, needs_sync=True, stands_with_root=lambda rank: not rank
        )
        sends = SimpleNamespace(broadcast_bytes=lambda value, _: sent.append(value) or sent[0], world=world)
        trainer = object.__new__(Trainer)
        trainer._learner = SimpleNamespace(callbacks=[callback])
        trainer._context = SimpleNamespace(collective=sends, warn=pytest.fail)
        trainer._kept = kept_by([callback], pytest.fail)
        trainer._tell_epoch = told.append
        trainer.state = SimpleNamespace(progress=SimpleNamespace(epoch=3))
        callback.on_train_begin()
        trainer._kept.begin()
        return lambda: trainer._catch_up(world)

    first, newcomer = made
    root, other = map(member, made, range(2))
    first.steps = newcomer.file  # a count that is the number of an open file travels
    own = newcomer.file
    root()
    assert told == []
    other()
    assert newcomer.file == own != first.file
    assert (newcomer.steps, told) == (first.steps, [3])


def test_groups_that_were_added_since_are_missed_in_one_line():
    first, second = one(), one()
    first.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    state = first.state.sent()
    refused("does not fit the optimizer: .* groups", lambda: second.state.load_state_dict(state))
