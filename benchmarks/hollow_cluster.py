"""`--cluster_spec` of the job in `benchmarks.kubernetes_scale`: hollow workers, and a master whose requests are counted."""

from __future__ import annotations

import os
from typing import Any

from kubernetes import client

from benchmarks.counted_master import FOLDER, MOUNT
from benchmarks.hollow_nodes import LABEL, NODES
from elasticdl.kube.manifests.names import ROLE_LABEL, Role


class HollowCluster:
    def with_pod(self, pod: Any) -> Any:
        (container,) = pod.spec.containers
        if pod.metadata.labels[ROLE_LABEL] == Role.MASTER:
            container.command = ["python", "-m", "benchmarks.counted_master", *container.command[3:]]
            container.env.append(client.V1EnvVar(name=FOLDER, value=MOUNT))
        else:
            pod.spec.node_selector = {LABEL: os.environ[NODES]}
            pod.spec.tolerations = [client.V1Toleration(key=LABEL, operator="Exists")]
        return pod


cluster = HollowCluster()
