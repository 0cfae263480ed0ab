"""Jobs of a trainer alone, and workers that come later or are behind, in the main thread."""

from __future__ import annotations

import pickle

from session_kit import receive

from elasticdl.elastic.core.plan import BatchPolicy
from elasticdl.elastic.torch_kit.participant import Outcome, Participant
from elasticdl.elastic.torch_kit.tensors import ElasticContext


class OwnJob:
    """In place of what knows this process's job: one of it alone, as often as one likes."""

    def init_in_place(self, global_batch_size):
        return ElasticContext.connect(BatchPolicy(global_batch_size, None), seed=0, environ={})

    def train_in_place(self, finish):
        self.finish = finish

    def leave(self): ...

    def rank(self):
        return 0


def keep_states(monkeypatch, work):
    """What it returns, and the states before each of its batches."""
    states, commit = [], Participant.commit

    def keep_and_commit(self, epoch):
        states.append(pickle.dumps(self.state.state_dict()))
        return commit(self, epoch)

    with monkeypatch.context() as patched:
        patched.setattr(Participant, "commit", keep_and_commit)
        return work(), states


def take(participant, state):
    """As when it is sent."""
    receive(participant.state, pickle.loads(state))


def come_later(monkeypatch, state, work):
    """``work`` on a worker that comes where the job has this state."""
    join = Participant.join

    def join_from(self):
        join(self)
        take(self, state)

    with monkeypatch.context() as patched:
        patched.setattr(Participant, "join", join_from)
        return work()


def be_behind(monkeypatch, step, state, work):
    """``work`` on a worker that has lost the connection when the gradients of this step had arrived everywhere else. ``state``: after that."""

    def take_theirs(participant, settle):
        take(participant, state)
        participant.open_batches.clear()
        return Outcome.BEHIND

    return _settling(monkeypatch, step, take_theirs, work)


def _settling(monkeypatch, step, instead, work):
    made, settle = [], Participant.settle

    def settle_otherwise(self, failure=None, **how):
        if not self.is_reduced and not self.is_catching_up:
            made.append(self.state.step)
            if len(made) == step:
                return instead(self, settle)
        return settle(self, failure, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Participant, "settle", settle_otherwise)
        return work()
