"""The front end that CONTRIBUTING shows keeps what all of them have to."""

import pytest
import torch
from front_end_kit import JobOfThreads, OwnJob, be_behind, be_torn, come_later, keep_states

from tests import small_front_end
from tests.small_front_end import ElasticTrainer, Trainer, make


def weights(trainer):
    return [each.detach() for each in trainer.model.parameters()]


def assert_same(ours, theirs, **tolerances):
    torch.testing.assert_close(weights(ours), weights(theirs), **(tolerances or {"rtol": 0, "atol": 0}))
    assert ours.losses == (pytest.approx(theirs.losses) if tolerances else theirs.losses)


class Draws:
    """As a callback may, after each step."""

    def update(self, loss):
        super().update(loss)
        torch.rand(1)


class PlainlyDraws(Draws, Trainer): ...


class ElasticallyDraws(Draws, ElasticTrainer): ...


@pytest.fixture
def train(monkeypatch):
    def train(kind=ElasticallyDraws, **options):
        monkeypatch.setattr(small_front_end, "runtime", OwnJob())
        trainer = make(kind, **options)
        trainer.train()
        return trainer

    return train


def test_alone_it_is_the_librarys_own_to_the_bit(train):
    assert_same(train(), train(PlainlyDraws))


def test_a_worker_that_comes_later_goes_on_from_any_batch(train, monkeypatch):
    whole, states = keep_states(monkeypatch, lambda: train(dropout=0.3))
    assert len(states) == 14
    for state in states:
        assert_same(come_later(monkeypatch, state, lambda: train(dropout=0.3)), whole)


def test_a_worker_whose_step_the_others_have_made_takes_their_state(train, monkeypatch):
    whole, states = keep_states(monkeypatch, lambda: train(dropout=0.3))
    assert_same(be_behind(monkeypatch, 9, states[9], lambda: train(dropout=0.3)), whole)


def test_a_torn_step_draws_the_same_numbers_and_leaves_those_of_the_script(train, monkeypatch):
    """By which the order of the second epoch is drawn."""
    whole, job = train(dropout=0.3), JobOfThreads(1)
    torn = make(ElasticallyDraws, dropout=0.3)
    monkeypatch.setattr(small_front_end, "runtime", job)
    said, _ = be_torn(monkeypatch, 3, lambda: job.run(lambda rank: torn.train()))
    assert said == (None,)
    assert_same(torn, whole, rtol=1e-5, atol=1e-6)


def test_workers_make_the_steps_of_one_also_where_one_is_lost(train, monkeypatch):
    expected = train(Trainer, shuffle=False)

    def run(loses_at):
        job = JobOfThreads(2)

        class Member(ElasticTrainer):
            def loss_of(self, batch):
                if job.rank() == 1 and len(self.losses) == loses_at:
                    job.board.lose()
                return super().loss_of(batch)

        monkeypatch.setattr(small_front_end, "runtime", job)
        trainers = [make(Member, shuffle=False) for _ in range(2)]
        said, _ = job.run(lambda rank: trainers[rank].train())
        return said, trainers

    said, trainers = run(loses_at=-1)
    assert said == (None, None)
    for each in trainers:
        assert_same(each, expected, rtol=1e-5, atol=1e-6)
    said, (first, _) = run(loses_at=9)
    assert [type(each).__name__ for each in said] == ["NoneType", "Lost"]
    assert_same(first, expected, rtol=1e-5, atol=1e-6)
