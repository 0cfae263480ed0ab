"""`python -m tests.cluster`: a cluster to play with, until Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import sys
import time

from tests.cluster.build import find_programs
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ControlPlaneError
from tests.cluster.recipes import BuildError, Unavailable

_CHECK_EACH_S = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description="A Kubernetes cluster to play with.")
    parser.add_argument("--nodes", type=int, default=2, help="how many nodes (default: 2)")
    parser.add_argument("--gpus", type=int, default=3, help="GPUs that each node says it has (default: 3)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has what it starts with & ignore
    try:
        nodes = {f"n{number}": options.gpus for number in range(options.nodes)}
        with Cluster(find_programs(_say), nodes) as cluster:
            print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
            _say(f"image of the nodes: {cluster.image}; logs: {cluster.logs}; Ctrl-C ends the cluster and removes it")
            while True:
                time.sleep(_CHECK_EACH_S)
                cluster.check()
    except KeyboardInterrupt:
        return 0
    except (Unavailable, BuildError, ControlPlaneError) as error:
        print(f"cluster: {error}", file=sys.stderr)
    return 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
