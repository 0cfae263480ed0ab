"""Keras through a random history of workers: the losses of plain Keras.

Model, state, plan, loader, sync and checkpoint are the real ones; workers are threads of this process, and their
history is made up here. The same with processes, a master and Horovod is in ``tests/e2e/test_training_keras.py``.
"""

import io
import random

import numpy as np
import pytest
from elastic_keras_kit import Board, Count, Trainee, plain_losses, run_all
from elastic_keras_kit import make_model as make_plain_model
from session_kit import enter, lose_world

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.core.protocol import Member, World, WorldBroken
from elasticdl.worker.keras_learner import KerasLearner

BATCH, EPOCHS, SAMPLES = 16, 10, 50
STEPS = EPOCHS * 4
POLICY = BatchPolicy(BATCH, None, 5)


def make_model():
    return make_plain_model(lambda: (Count(),))


class History:
    """A job of up to four workers, in which after a few steps something happens, again and again."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        # processes that may be started
        self.idle = [Trainee(0, Board(1), POLICY, make_model(), joins=False) for _ in range(4)]
        self.all = list(self.idle)
        self.members = []
        self.losses = {}  # by step, as the last who made it
        self.happened = set()
        self.worlds = 0

    def play(self):
        self.join(1)
        while not self.members or self.members[0].state.step < STEPS:
            self.join(self.rng.randint(0, len(self.idle)))
            self.form()
            last = min(self.members[0].state.step + self.rng.randint(1, 3), STEPS)
            alone = len(self.members) == 1 or last == STEPS
            event = self.rng.choice([self.leave, self.restart] if alone else [self.kill, self.torn, self.leave])
            event(last)

    def join(self, count):
        for newcomer in self.idle[:count]:
            for variable in (*newcomer.model.variables, *newcomer.optimizer.variables[2:]):
                variable.assign(variable + 1)  # what it has before it is brought to the others' state must not count
            newcomer.begin()
            self.members.append(newcomer)
        del self.idle[:count]

    def part(self, member):
        self.members.remove(member)
        self.idle.append(member)

    def form(self):
        """All members in one world, the most advanced first, and brought to its state."""
        if not any(member.state.has_state for member in self.members):
            self.members[0].model.set_weights(make_model().get_weights())
            for variable in self.members[0].optimizer.variables[2:]:
                variable.assign(variable * 0)
        self.members.sort(key=lambda member: (not member.state.has_state, -member.state.step))
        self.worlds += 1
        board = Board(len(self.members))
        standing = tuple(
            Member(number, "h", member.state.step, member.state.has_state) for number, member in enumerate(self.members)
        )
        for rank, member in enumerate(self.members):
            member.collective.enter(rank, board)
            member.collective.world = World.of(self.worlds, standing, rank)
        run_all(self.members, lambda member: member.state.sync(member.collective.world))
        for member in self.members:
            enter(member.context, member.collective.world)
        self.happened.add(len(self.members))

    # -- what happens, after the step with this number --

    def leave(self, last):
        """All leave after the same step, and some for good."""
        self.work(last)
        for member in self.rng.sample(self.members, self.rng.randint(0, len(self.members) - 1)):
            self.part(member)

    def kill(self, last):
        """In the step that follows: some are lost before its sum is there, and of the others only some receive it."""
        lost = self.rng.randrange(len(self.members))  # rank 0 as well as any other
        heard = [rank for rank in range(len(self.members)) if rank != lost and self.rng.random() < 0.5]
        self.work(last, heard=heard, breaks=True)
        self.part(self.members[lost])
        self.happened.add("half" if heard else "none")

    def torn(self, last):
        """The connection breaks, and all are still there."""
        self.work(last, breaks=True)
        self.happened.add("torn")

    def restart(self, last):
        """The last one ends, and another goes on from its checkpoint."""
        self.work(last)
        file = io.BytesIO()
        first = self.members[0].state
        KerasLearner.codec.write(KerasLearner.codec.copy(first.state_dict()), file)
        self.part(self.members[0])
        self.join(1)
        file.seek(0)
        self.members[0].state.load_state_dict(KerasLearner.codec.read(file))
        self.members[0].state._position.has_state = True
        self.happened.add("restart")

    # -- training --

    def work(self, last, heard=(), breaks=False):
        steps = last - self.members[0].state.step
        for rank, member in enumerate(self.members):
            collective = member.collective
            collective.fails_at, collective.contributes = None, True
            if breaks:
                collective.fails_at = steps + 1 + (rank in heard)
                collective.contributes = rank not in heard
        run_all(self.members, lambda member: self.train(member, STEPS if breaks else last))

    def train(self, member, last):
        state = member.state
        try:
            for _ in member.loader.epochs(EPOCHS):
                for batch in member.loader:
                    self.losses[batch.plan.step] = state.make_step(batch)
                    state.commit()
                    if state.step >= last:
                        return
        except WorldBroken:
            lose_world(member.context)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_random_history_does_not_show_in_the_losses(seed):
    history = History(seed)
    history.play()
    assert history.happened == {1, 2, 3, 4, "half", "none", "torn", "restart"}
    expected = plain_losses(BATCH, EPOCHS)
    assert sorted(history.losses) == list(range(1, STEPS + 1))
    assert int(history.members[0].model.layers[1].calls) == STEPS, "a step that is torn leaves no trace"
    assert {each for member in history.all for each in member.train_step.traces.values()} == {1}
    np.testing.assert_allclose([history.losses[step] for step in range(1, STEPS + 1)], expected, rtol=1e-5)
