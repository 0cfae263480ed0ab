"""What tests on a cluster begin with: a client in a namespace of their own."""

import pytest

from elasticdl.kube.client import Client, connect
from elasticdl.kube.kubeconfig import ClusterTarget


@pytest.fixture
def place(cluster, namespace, monkeypatch, tmp_path) -> Client:
    """As the command line makes it, of whoever may do everything."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    monkeypatch.setenv("ELASTICDL_HOME", str(tmp_path / "home"))
    return connect(ClusterTarget(namespace))
