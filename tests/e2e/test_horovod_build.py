"""What the edits of `scripts/build_horovod.py` are for; freezes are in `tests/contract/test_collectives.py`."""

import os
import subprocess
import sys

import pytest

from elasticdl.elastic.collectives.horovod import horovod_host
from elasticdl.elastic.core.protocol import ALONE

DEADLINE = 120.0
TWO_WORLDS = """
import horovod.torch as hvd

from dataclasses import replace

from elasticdl.elastic.collectives.horovod import HorovodWorld
from elasticdl.elastic.link.store import KvServer, KvStore
from elasticdl.elastic.core.protocol import ALONE

class Asked(KvStore):
    def get(self, key, timeout, world=None):
        print("asked for", key[0])
        return super().get(key, timeout, world)

published = []
store = Asked(lambda world, key, value: published.append(key))
world = HorovodWorld(hvd, KvServer(store), "lo")
for version in (1, 2):
    print("world", version)
    store.open_world(version)
    world.start(replace(ALONE, version=version))
    world.stop()
print("published", published)
"""


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


def test_horovod_is_in_elastic_mode_while_it_starts_and_asks_for_nothing_else():
    """By the variable that makes a second start ask for its place it decides, a few lines on, what it does under NCCL."""
    arguments = [sys.executable, "-c", TWO_WORLDS]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert ended.stdout.splitlines() == ["world 1", "world 2", "asked for rank_and_size", "published []"], ended.stderr
