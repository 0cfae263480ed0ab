"""The requests of nodes, by elasticdl's own client: the official one takes a second to import its models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kubernetes.client import ApiException

from elasticdl.kube.client import ANSWER_SECONDS, JSON, Client, connect
from elasticdl.kube.kubeconfig import ClusterTarget

Json = dict[str, Any]
STRATEGIC = "application/strategic-merge-patch+json"


class Api(Client):
    """Requests to one API server for objects of all namespaces; safe for many threads."""

    def __init__(self, kubeconfig: Path) -> None:
        super().__init__(connect(ClusterTarget(file=str(kubeconfig))).api, "")

    def ask(self, method: str, path: str, body: Json | None = None, **query: str) -> Json:
        """
        Raises:
            NotDoneError: the server refuses.
            NoAnswerError: it does not answer.
        """
        headers = {"Content-Type": STRATEGIC if method == "PATCH" else JSON, "Accept": JSON}
        url, signed = self.signed(method, path, list(query.items()), headers)
        with self.translated(f"{method} {path}"):
            answer = self.api.call_api(method, url, signed, body, _request_timeout=ANSWER_SECONDS)
            content = answer.read()
            if not 200 <= answer.status <= 299:
                raise ApiException.from_response(http_resp=answer, body=None, data=None)
            found: Json = json.loads(content)
            return found

    def addresses(self, service: str, namespace: str) -> list[str]:
        """Where a Service leads to: its own address or, if it is headless, those of its pods that run.

        Raises:
            NotDoneError, NoAnswerError: there is none, or the server does not say.
        """
        path = f"/api/v1/namespaces/{namespace}"
        spec = self.ask("GET", f"{path}/services/{service}")["spec"]
        if spec.get("clusterIP") not in (None, "", "None"):
            return [spec["clusterIP"]]
        selector = ",".join(f"{key}={value}" for key, value in spec["selector"].items())
        pods = self.ask("GET", f"{path}/pods", labelSelector=selector)["items"]
        there = (pod["status"] for pod in pods if not pod["metadata"].get("deletionTimestamp"))
        return [status["podIP"] for status in there if status.get("phase") == "Running" and status.get("podIP")]
