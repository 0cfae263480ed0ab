"""What the edits of `scripts/build_horovod.py` are for, with Horovod's own processes."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elasticdl.elastic.collectives.store import KvServer, KvStore
from elasticdl.elastic.core.world import ALONE, horovod_host

SCRIPT = str(Path(__file__).parent / "frozen_peer.py")
DEADLINE = 120.0
# Gloo's own timeout is not what ends the waiting.
PATIENT = {**os.environ, "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600", "HOROVOD_ELASTIC": "1"}


class SharedServer(KvServer):
    """Serves other processes: each worker of a job has one of its own, in itself."""

    def verify_request(self, request: object, client_address: object) -> bool:
        return True


@pytest.fixture
def store() -> Iterator[KvServer]:
    store = KvStore(lambda *_: None)
    store.open_world(1, {})
    server = SharedServer(store)
    server.open()
    yield server
    server.close()


@contextlib.contextmanager
def member(*arguments: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=PATIENT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("sends", [True, False])
def test_who_is_in_the_middle_of_a_transfer_with_a_frozen_peer_learns_that_the_world_is_broken(store, sends):
    with member(0, store.port, 0) as root, member(1, store.port, 0 if sends else root.pid) as other:
        survivor, frozen = (root, other) if sends else (other, root)
        deadline = time.monotonic() + DEADLINE
        while psutil.Process(frozen.pid).status() != psutil.STATUS_STOPPED:
            assert survivor.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        said, _ = survivor.communicate("broken\n", timeout=DEADLINE)
    assert said == "noticed\n"
    assert survivor.returncode == 0


def test_a_worker_on_a_host_whose_name_does_not_resolve_uses_the_interface_that_it_was_given():
    own_name = ["unshare", "--uts"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--uts"]
    command = 'echo nowhere.invalid > /proc/sys/kernel/hostname && exec "$0" -c "$1"'
    init = "import horovod.torch as hvd; hvd.init(); print(hvd.size())"
    values = {"RANK": 0, "SIZE": 1, "LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": 0, "CROSS_SIZE": 1}
    values |= {"HOSTNAME": horovod_host(ALONE), "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo"}
    environment = {**os.environ, **{f"HOROVOD_{name}": str(value) for name, value in values.items()}}
    if subprocess.run([*own_name, "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody have a host name of their own")
    arguments = [*own_name, "sh", "-c", command, sys.executable, init]
    ended = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (ended.returncode, ended.stdout) == (0, "1\n"), ended.stderr
