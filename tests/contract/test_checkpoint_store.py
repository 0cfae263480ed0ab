"""What every checkpoint store promises, on each kind of file system."""

import errno
import os
import subprocess
import sys
import textwrap
import uuid

import fsspec
import pytest

from elasticdl.common.errors import UserError
from elasticdl.elastic.training.checkpoint_store import CheckpointStore


@pytest.fixture(params=["folder", "file", "memory"])
def url(request, tmp_path):
    name = uuid.uuid4().hex
    yield {
        "folder": str(tmp_path / "deep" / name),
        "file": f"file://{tmp_path}/{name}",
        "memory": f"memory://elasticdl/{name}",
    }[request.param]
    if request.param == "memory":
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
    assert steps(store) == [11, 10, 9, 2], "what others have written is seen"


@pytest.mark.parametrize(("keep", "kept"), [(3, [7, 6, 5]), (0, [7, 6, 5, 4, 3, 2, 1])])
def test_keeps_the_newest_and_all_with_zero(url, keep, kept):
    store = CheckpointStore(url, keep=keep, writer="me")
    for step in range(1, 8):
        save(store, step)
    assert steps(store) == kept


def fail_after(content, error):
    def dump(file):
        file.write(content)
        raise error

    return dump


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("no"), KeyboardInterrupt()]
)
def test_a_failure_leaves_what_was_there_and_nothing_else(store, url, error):
    for step in (1, 2, 3):
        save(store, step)
    before = files(url)
    with pytest.raises(type(error)):
        store.write(4, fail_after(b"half", error))
    with pytest.raises(type(error)):
        store.write(3, fail_after(b"half", error))
    assert files(url) == before
    assert read(store, 3) == b"state"


def test_nobody_sees_a_part(store):
    def dump(file):
        file.write(b"half")
        assert steps(store) == []

    store.write(1, dump)
    assert steps(store) == [1]


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


def test_a_full_disk_for_real(tmp_path):
    """A limit on the size of files makes the kernel refuse in the middle of a write."""
    program = textwrap.dedent("""
        import resource, signal, sys, torch
        from elasticdl.elastic.training.checkpoint_store import CheckpointStore
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = CheckpointStore(sys.argv[1], keep=3, writer="me")
        store.write(1, lambda file: torch.save(torch.zeros(10), file))
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            store.write(2, lambda file: torch.save(torch.zeros(100_000), file))
        except OSError as error:
            print("refused:", error.strerror)
    """)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused: File too large\n"
    assert os.listdir(tmp_path) == ["checkpoint-0000000001.pt"]
