"""Whether there is a cluster to be asked: known without the package ``kubernetes``, which takes long to import."""

from __future__ import annotations

from elasticdl.kube import kubeconfig
from elasticdl.kube.kubeconfig import Place


def is_configured() -> bool:
    return kubeconfig.is_configured(Place())
