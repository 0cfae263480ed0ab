"""A training state is a list of pieces: what is in it is kept, undone, sent, written and compared; what is not, does not exist."""

import io

import torch
from elastic_kit import Board, Trainee, in_threads
from refusal_kit import refused

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import SaveScope
from elasticdl.elastic.training.pieces import Piece

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


def test_a_new_piece_is_kept_undone_written_read_compared_and_sent_with_all_others():
    board = Board(2)
    members = [Trainee(rank, board, POLICY, values=lambda _: {"average": Average()}) for rank in range(2)]
    other = members[1]
    average = other.state.values["average"]
    average.weights += 1
    keep(other)
    average.weights += 1
    other.state.restore()
    assert average.weights.tolist() == [1, 1]
    file = io.BytesIO()
    other.state.write(file)
    file.seek(0)
    third = one()
    third.state.load(third.state.unpack(file))
    assert third.state.values["average"].weights.tolist() == [1, 1]

    def train(member):
        refused(r"average\.weights differs", member.train)
        member.state.take_over()

    in_threads(train, members)
    assert average.weights.tolist() == [0, 0]


def test_a_value_that_came_after_the_last_commit_stays_where_a_step_is_torn():
    member = one()
    keep(member)
    later = member.state.values["later"] = torch.optim.lr_scheduler.StepLR(member.optimizer, 1)
    later.last_epoch = 7
    member.state.restore()
    assert later.last_epoch == 7


def test_groups_that_were_added_since_are_missed_in_one_line():
    first, second = one(), one()
    first.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    state = first.state.sent()
    refused("does not fit the optimizer: .* groups", lambda: second.state.load_state_dict(state))
