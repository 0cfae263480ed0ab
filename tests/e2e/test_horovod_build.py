"""What the edits of `scripts/build_horovod.py` are for; freezes are in `tests/contract/test_collectives.py`."""

import os
import subprocess
import sys

import pytest

from elasticdl.elastic.collectives.horovod import horovod_host
from elasticdl.elastic.core.protocol import ALONE

DEADLINE = 120.0


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
