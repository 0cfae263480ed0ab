"""``elasticdl delete``: remove a job on a cluster, whatever its state, with everything that belongs to it."""

from __future__ import annotations

from collections.abc import Sequence

from elasticdl.cli.finding import add_place
from elasticdl.cli.on_cluster import delete_on_cluster
from elasticdl.cli.parser import Parser


def command(argv: Sequence[str]) -> int:
    parser = Parser("delete", "Remove a job on a Kubernetes cluster: it ends at once, and nothing of it stays.")
    parser.add_argument("job", help="name of the job")
    add_place(parser)
    given = parser.parse(argv)
    print(delete_on_cluster(given.job, given.namespace, given.kube_context))
    return 0
