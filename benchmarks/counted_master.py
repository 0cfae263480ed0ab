"""The master of a job on a cluster, as it is, with a line for each request that it makes of the API server.

    python -m benchmarks.counted_master --job_folder DIR

This file is also the `--cluster_spec` of the job in `benchmarks.kubernetes_scale`, which has its master run so, and puts its
workers on hollow nodes.

The lines go to `REQUESTS`, where the benchmark has put a folder of the host into its pod. Each is JSON: when the request
was begun (seconds since the epoch), its verb and resource as Kubernetes names them, how long the answer took (of a watch:
to begin) and its status, 0 if there was none. The first line has the process id.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kubernetes import client
from kubernetes.client import ApiException, rest

from elasticdl.kube.manifests.names import ROLE_LABEL, Role

MOUNT = "/benchmark"
REQUESTS = "requests.jsonl"
FOLDER = "ELASTICDL_BENCHMARK_FOLDER"  # the variable with that folder, as its process finds it
LABEL = "benchmark.elasticdl.org/hollow"  # of hollow nodes, and their taint
NODES = "ELASTICDL_BENCHMARK_NODES"  # the variable that tells a submission the value of that label
_PATH = re.compile(r"^/apis?/.*?/namespaces/[^/]+/(?P<resource>[a-z]+)(?P<one>/[^/]+)?")
_VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update"}


def verb_and_resource(method: str, url: str) -> tuple[str, str]:
    """What a request is called in a Role."""
    parts = urlsplit(url)
    found = _PATH.match(parts.path)
    if found is None:
        return method.lower(), parts.path
    one, resource = bool(found["one"]), found["resource"]
    if method == "GET":
        return ("watch" if "watch=" in parts.query else "get" if one else "list"), resource
    if method == "DELETE":
        return ("delete" if one else "deletecollection"), resource
    return _VERBS.get(method, method.lower()), resource


def count_requests(path: Path) -> None:
    """From now on each request of the official client is a line of this file."""
    lock = threading.Lock()
    request: Callable[..., Any] = rest.RESTClientObject.request

    def counted(self: Any, method: str, url: str, *arguments: Any, **options: Any) -> Any:
        began, status = time.time(), 0
        try:
            answer = request(self, method, url, *arguments, **options)
            status = int(answer.status)
            return answer
        except ApiException as error:
            status = int(error.status or 0)
            raise
        finally:
            verb, resource = verb_and_resource(method, url)
            line = {"time": began, "verb": verb, "resource": resource, "seconds": time.time() - began, "status": status}
            with lock, path.open("a") as lines:
                lines.write(json.dumps(line) + "\n")

    path.write_text(json.dumps({"time": time.time(), "pid": os.getpid()}) + "\n")
    rest.RESTClientObject.request = counted  # type: ignore[method-assign]


class HollowCluster:
    """See `--cluster_spec`."""

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


if __name__ == "__main__":
    from elasticdl.master.shell.cluster_master import main

    count_requests(Path(os.environ[FOLDER]) / REQUESTS)
    sys.exit(main())
