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
from typing import Any

from kubernetes import client

from elasticdl.common.errors import UserError
from elasticdl.common.reason import one_line
from elasticdl.kube.manifests.merge import Manifest


class ClusterSpec:
    """``path`` may be empty: then nothing is changed."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            UserError: it can't be run, or has no ``cluster``.
        """
        self._source = f"--cluster_spec {path}"
        self._cluster: object = None
        self._client: Any = client.ApiClient()
        if not path:
            return
        try:
            names = runpy.run_path(path)
        except OSError as error:
            raise UserError(f"{self._source}: {error.strerror}") from None
        except Exception as error:  # the user's code may raise anything
            raise UserError(f"{self._source} raised {one_line(error)}") from error
        if "cluster" not in names:
            raise UserError(f"{self._source} must define `cluster`, an object with with_pod and with_service")
        self._cluster = names["cluster"]

    def adapt_pod(self, pod: Manifest) -> Manifest:
        """A pod's metadata and spec.

        Raises:
            UserError: the user's method raised, or returned no pod.
        """
        adapted = self._adapt("with_pod", "V1Pod", {"apiVersion": "v1", "kind": "Pod", **pod})
        return {"metadata": adapted["metadata"], "spec": adapted["spec"]}

    def adapt_service(self, service: Manifest) -> Manifest:
        """Raises as `adapt_pod`."""
        return self._adapt("with_service", "V1Service", service)

    def _adapt(self, method: str, kind: str, manifest: Manifest) -> Manifest:
        adapt = getattr(self._cluster, method, None)
        if adapt is None:
            return manifest
        built = self._client.deserialize(json.dumps(manifest), kind, "application/json")
        try:
            adapted = adapt(built)
        except Exception as error:  # as above
            raise UserError(f"{self._source}: {method} raised {one_line(error)}") from error
        if type(adapted) is not type(built):
            raise UserError(f"{self._source}: {method} must return the {kind}, not {adapted!r}")
        made: Manifest = self._client.sanitize_for_serialization(adapted)
        return made
