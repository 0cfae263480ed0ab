"""What a checkpoint store promises, on each kind of file system; and the writer in the background, whose failure costs only a checkpoint."""

import errno
import sys
import threading
import time
import uuid
from types import SimpleNamespace

import fsspec
import pytest

from elasticdl.common.errors import UserError
from elasticdl.elastic.training.checkpoint_store import CheckpointStore
from elasticdl.worker.learner import CheckpointWriter

PATIENCE = 30.0  # seconds; for what is expected to happen at once


@pytest.fixture(params=["folder", "memory"])
def url(request, tmp_path):
    name = uuid.uuid4().hex
    if request.param == "folder":
        yield str(tmp_path / "deep" / name)
        return
    yield f"memory://elasticdl/{name}"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def store(url):
    return CheckpointStore(url, keep=3, writer="me")


def files(url):
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(path.rpartition("/")[2] for path in fs.ls(root, detail=False)) if fs.exists(root) else []


def save(store, step, content=b"state"):
    store.write(step, lambda file: file.write(content))


def read(store, step):
    return store.read(step, lambda file: file.read())


def steps(store):
    return [checkpoint.step for checkpoint in store.newest_first()]


def test_what_was_written_is_read_and_listed_newest_first(store, url):
    assert steps(store) == []
    for step in (2, 10, 9):
        save(store, step, f"state {step}".encode())
    assert steps(store) == [10, 9, 2]
    assert store.newest_first()[0].path == f"{url}/checkpoint-0000000010.pt"
    save(store, 9, b"new")
    assert read(store, 9) == b"new"
    assert files(url) == [f"checkpoint-{step:010d}.pt" for step in (2, 9, 10)]
    save(CheckpointStore(url, keep=0, writer="other"), 11)
    assert steps(store) == [11, 10, 9, 2], "what others have written is seen; with 0 all are kept"
    save(store, 12)
    assert steps(store) == [12, 11, 10]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_nobody_sees_a_part_and_a_failure_leaves_what_was_there(store, url, error):
    def fail(file):
        file.write(b"half")
        assert steps(store) == [3, 2, 1]
        raise error

    for step in (1, 2, 3):
        save(store, step)
    before = files(url)
    for step in (4, 3):
        with pytest.raises(type(error)):
            store.write(step, fail)
    assert files(url) == before
    assert read(store, 3) == b"state"


def test_what_a_dead_writer_left_goes_with_the_next_newer_checkpoint(store, url):
    fs, root = fsspec.core.url_to_fs(url)
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(f"{root}/.checkpoint-0000000005.pt.dead", b"half")
    fs.pipe_file(f"{root}/.checkpoint-0000000009.pt.alive", b"half")
    fs.pipe_file(f"{root}/notes.txt", b"the user's own")
    save(store, 6)
    assert files(url) == [".checkpoint-0000000009.pt.alive", "checkpoint-0000000006.pt", "notes.txt"]


@pytest.mark.parametrize("place", ["nosuchkind://bucket/x", "s3://bucket/x"])
def test_an_unknown_kind_of_place_is_the_users_mistake(monkeypatch, place):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=f"--checkpoint_dir {place}"):
        CheckpointStore(place, keep=1, writer="me")


# -- in the background --


@pytest.fixture
def writer(tmp_path):
    """With a session as it sees one."""
    said = []
    session = SimpleNamespace(said=said, notify=lambda event, **fields: said.append((event, fields)))
    made = CheckpointWriter(CheckpointStore(str(tmp_path), keep=2, writer="me"), session)
    made.said, made.store = said, CheckpointStore(str(tmp_path), keep=2, writer="reader")
    return made


def soon():
    return time.monotonic() + PATIENCE


def quick():
    return lambda file: file.write(b"state")


def unneeded():
    raise AssertionError("a copy costs memory and time")


@pytest.fixture
def slow(writer):
    """A writer that is at step 1, and is let go on."""
    begun, go = threading.Event(), threading.Event()

    def write(file):
        begun.set()
        assert go.wait(PATIENCE)
        file.write(b"slow")

    assert writer.begin(1, lambda: write)
    assert begun.wait(PATIENCE)
    yield go
    go.set()
    assert writer.wait(soon())


def test_one_is_left_out_while_another_is_being_written(writer, slow):
    assert not writer.begin(2, unneeded)
    assert writer.begin(1, unneeded)  # training has come back to step 1: it is under way
    slow.set()
    assert writer.wait(soon())
    assert writer.begin(3, quick)
    assert writer.wait(soon())
    assert steps(writer.store) == [3, 1]
    (event, fields), (other, _) = writer.said
    assert (event, other, fields["step"], fields["path"]) == ("checkpoint", "checkpoint", 1, writer.store.path(1))


def test_finish_waits_for_what_is_under_way_and_writes_the_last_once(writer, slow):
    writer.finish(2, quick, soon(), slow.set)  # it ticks meanwhile
    writer.finish(2, unneeded, soon())
    assert (steps(writer.store), len(writer.said)) == ([2, 1], 2)


def test_finish_gives_up_at_its_deadline(writer, slow):
    writer.finish(2, unneeded, time.monotonic())
    assert steps(writer.store) == []


def test_what_failed_is_told_and_tried_again_at_the_end(writer):
    def full_disk(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer.begin(2, lambda: full_disk)
    writer.wait(soon())
    told = {"step": 2, "path": writer.store.path(2), "reason": "OSError: [Errno 28] No space left on device"}
    assert writer.said == [("checkpoint_failed", told)]
    writer.finish(2, quick, soon())
    assert steps(writer.store) == [2]
