"""Workers that share a GPU reduce by NCCL all the same, each as if on a host of its own: the only way to run NCCL on one GPU.

NCCL takes two of them for one only on one host, and goes by sockets between hosts.
"""

from __future__ import annotations

import os

from elasticdl.common.environment import SHARED_GPU, WORKER_ID

WANTED = "BENCHMARK_NCCL_ON_ONE_GPU"
# For all workers alike: between hosts by the loopback device.
OF_ALL = {WANTED: "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def take_own_host() -> None:
    """Where that is wanted; before `elastic.init`."""
    if WANTED in os.environ:
        os.environ.pop(SHARED_GPU, None)
        os.environ["NCCL_HOSTID"] = f"worker-{os.environ[WORKER_ID]}"
