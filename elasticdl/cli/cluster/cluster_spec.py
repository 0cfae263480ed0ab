"""``--cluster_spec``: the user's module that adapts a job's pods and its service to a cluster, as ElasticDL has it.

    class MyCluster:
        def with_pod(self, pod): ...          # a kubernetes.client.V1Pod, returned as it shall be
        def with_service(self, service): ...  # a V1Service
    cluster = MyCluster()

It is run once, when the job is submitted; either method may be missing.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from functools import partial
from typing import Any

from kubernetes import client

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.kube.manifests.merge import Manifest

Adapt = Callable[[Manifest], Manifest]


def adapters(path: str) -> tuple[Adapt, Adapt]:
    """What adapts a pod, and what adapts the service; nothing is changed if ``path`` is empty.

    Raises:
        UserError: the module can't be run, or has no ``cluster``; and when they are called: the user's method raised, or
            returned something else.
    """
    if not path:
        return lambda pod: pod, lambda service: service
    source = f"--cluster_spec {path}"
    try:
        names = runpy.run_path(path)
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}") from None
    except Exception as error:  # the user's code may raise anything
        raise UserError(f"{source} raised {one_line(error)}") from error
    if "cluster" not in names:
        raise UserError(f"{source} must define `cluster`, an object with with_pod and with_service")
    api: Any = client.ApiClient()

    def adapted(method: str, kind: str, manifest: Manifest) -> Manifest:
        adapt = getattr(names["cluster"], method, None)
        if adapt is None:
            return manifest
        built = api.deserialize(json.dumps(manifest), kind, "application/json")
        try:
            changed = adapt(built)
        except Exception as error:  # as above
            raise UserError(f"{source}: {method} raised {one_line(error)}") from error
        if type(changed) is not type(built):
            raise UserError(f"{source}: {method} must return the {kind}, not {changed!r}")
        made: Manifest = api.sanitize_for_serialization(changed)
        return made

    def adapted_pod(pod: Manifest) -> Manifest:
        made = adapted("with_pod", "V1Pod", {"apiVersion": "v1", "kind": "Pod", **pod})
        return {"metadata": made["metadata"], "spec": made["spec"]}

    return adapted_pod, partial(adapted, "with_service", "V1Service")
