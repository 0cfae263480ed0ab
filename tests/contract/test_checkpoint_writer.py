"""Writing checkpoints in the background: one at a time, and a failure costs only that checkpoint."""

import errno
import threading
import time
from types import SimpleNamespace

import pytest

from elasticdl.elastic.training.checkpoint_store import CheckpointStore
from elasticdl.worker.learner import CheckpointWriter

PATIENCE = 30.0  # seconds; for what is expected to happen at once


@pytest.fixture
def listener():
    """A session as the writer sees it."""
    said = []
    return SimpleNamespace(said=said, notify=lambda event, **fields: said.append((event, fields)))


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(str(tmp_path), keep=2, writer="me")


@pytest.fixture
def writer(store, listener):
    return CheckpointWriter(store, listener)


def soon():
    return time.monotonic() + PATIENCE


def quick():
    return lambda file: file.write(b"state")


class Slow:
    """A file system that takes its time."""

    def __init__(self):
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self):
        return self.write

    def write(self, file):
        self.begun.set()
        assert self.go.wait(PATIENCE)
        file.write(b"slow")


def steps(store):
    return [checkpoint.step for checkpoint in store.newest_first()]


def test_leaves_one_out_while_another_is_being_written(writer, store, listener):
    slow = Slow()
    assert writer.begin(1, slow)
    assert slow.begun.wait(PATIENCE)
    assert not writer.begin(2, unneeded)
    assert writer.begin(1, unneeded)  # training has come back to step 1: it is under way
    slow.go.set()
    assert writer.wait(soon())
    assert steps(store) == [1]
    assert writer.begin(3, quick)
    assert writer.wait(soon())
    assert steps(store) == [3, 1]
    (event, fields), (other, _) = listener.said
    assert (event, other, fields["step"], fields["path"]) == ("checkpoint", "checkpoint", 1, store.path(1))
    assert fields["seconds"] >= 0


def full_disk():
    def write(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    return write


def unneeded():
    raise AssertionError("a copy costs memory and time")


def test_finish_waits_for_what_is_under_way_and_writes_the_last(writer, store):
    slow = Slow()
    writer.begin(1, slow)
    writer.finish(2, quick, soon(), slow.go.set)  # it ticks meanwhile
    assert steps(store) == [2, 1]


def test_finish_writes_nothing_twice_but_tries_again_what_failed(writer, store, listener):
    writer.begin(1, quick)
    writer.wait(soon())
    writer.finish(1, unneeded, soon())
    assert len(listener.said) == 1
    writer.begin(2, full_disk)
    writer.wait(soon())
    assert steps(store) == [1]
    told = {"step": 2, "path": store.path(2), "reason": "OSError: [Errno 28] No space left on device"}
    assert listener.said[-1] == ("checkpoint_failed", told)
    writer.finish(2, quick, soon())
    assert steps(store) == [2, 1]


def test_finish_gives_up_at_its_deadline(writer, store):
    slow = Slow()
    writer.begin(1, slow)
    writer.finish(2, unneeded, time.monotonic())
    assert steps(store) == []
    slow.go.set()
    assert writer.wait(soon())
