"""A hook that opens a file by its number: each worker has its own, and never another's number, which is another file there."""

import os
from types import SimpleNamespace

import pytest
import torch

from elasticdl.callbacks import Callback
from elasticdl.elastic.torch_kit.pieces.model_attributes import Attributes, holders_of_callbacks


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


def begun(callback):
    model = torch.nn.Linear(1, 1)
    attributes = Attributes(lambda: [model], pytest.fail)
    attributes.add(*holders_of_callbacks([callback], ("elasticdl",), is_noted=False))
    callback.on_train_begin()
    attributes.begin()
    return attributes


def test_a_newcomer_of_torch_keeps_its_own_file(made):
    first, newcomer = made
    sent, received = map(begun, made)
    first.steps = newcomer.file
    own = newcomer.file
    received.load(sent.dump())
    assert newcomer.file == own != first.file
    assert newcomer.steps == first.steps, "a count that is the number of an open file travels"


def test_a_newcomer_of_keras_keeps_its_own_file(made):
    pytest.importorskip("keras")
    from elasticdl.worker.keras_learner import OwnCallbacks

    first, newcomer = made
    sent = []

    def member(callback, rank):
        world = SimpleNamespace(size=2, needs_sync=True, rank=rank, stands_with_root=lambda rank: rank == 0)
        sends = SimpleNamespace(broadcast_bytes=lambda value, _: sent.append(value) or sent[0], world=world)
        return OwnCallbacks([callback], sends), world

    (root, its_world), (other, others_world) = member(first, 0), member(newcomer, 1)
    first.on_train_begin()
    root.catch_up(pytest.fail)
    first.steps = 7
    root.enter(its_world)
    other.enter(others_world)
    newcomer.on_train_begin()
    own = newcomer.file
    other.catch_up(lambda: None)
    assert (newcomer.file, newcomer.steps) == (own, 7)
