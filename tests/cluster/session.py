"""What a test run says of clusters before its tests and after: hooks for a `conftest.py`. Imports little, as most tests
need no cluster."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from tests.cluster.build import CLUSTER

# So begins why a test that needs a cluster is skipped.
NO_CLUSTER = "no Kubernetes cluster"


def pytest_report_header() -> str | None:
    """What a first run builds: with several processes nobody sees what each of them says."""
    if "ELASTICDL_TEST_KUBECONFIG" in os.environ or CLUSTER.is_built:
        return None
    return (
        "kubernetes: not built yet; if there are tests on a cluster it is built beside the others, and they wait for it: "
        f"6 minutes of two idle cores, once (log: {CLUSTER.log()})"
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many tests were skipped for want of a cluster, by why."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = (str(report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple))
    missed = Counter(reason.partition(f"{NO_CLUSTER}: ")[2] for reason in reasons)
    for reason, count in missed.items():
        if reason:
            terminalreporter.line(f"tests on a cluster that were skipped: {count}: {reason}")
