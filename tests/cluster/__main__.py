"""`python -m tests.cluster`: a cluster to play with, until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from tests.cluster.build import BuildError, Unavailable
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ControlPlaneError
from tests.cluster.programs import find_programs

_CHECK_EACH_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description="A Kubernetes cluster to play with.")
    parser.add_argument("--nodes", type=int, default=2, help="how many nodes (default: 2)")
    parser.add_argument("--gpus", type=int, default=3, help="GPUs that each node says it has (default: 3)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        programs = find_programs(lambda line: print(line, file=sys.stderr, flush=True))
        with Cluster(programs, {f"n{number}": options.gpus for number in range(options.nodes)}) as cluster:
            print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
            print(f"logs: {cluster.logs}; Ctrl-C ends the cluster and removes it", file=sys.stderr, flush=True)
            never = threading.Event()
            while not never.wait(_CHECK_EACH_S):
                cluster.check()
    except KeyboardInterrupt:
        return 0
    except (Unavailable, BuildError, ControlPlaneError) as error:
        print(f"cluster: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
