"""The requests of a node, by elasticdl's own client: the official one takes a second to import its models."""

from __future__ import annotations

import json
from typing import Any

from kubernetes.client import ApiClient, ApiException, Configuration

from elasticdl.kube.client import ANSWER_SECONDS, JSON, SILENCE_SECONDS, WATCH_SECONDS, Changes, Client, Source
from tests.cluster.pki import Pair

Json = dict[str, Any]
STRATEGIC = "application/strategic-merge-patch+json"
PODS = "/api/v1/pods"


class Api(Client):
    """Requests to one API server for objects of all namespaces; safe for many threads."""

    def __init__(self, server: str, authority: str, identity: Pair) -> None:
        configuration = Configuration(server, ssl_ca_cert=authority, connection_pool_maxsize=8)
        configuration.cert_file, configuration.key_file = str(identity.certificate), str(identity.key)
        configuration.retries = False
        super().__init__(ApiClient(configuration), "")

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


class PodsOfNode(Source):
    """What `elasticdl.kube.client.Watch` follows."""

    def __init__(self, api: Api, node: str) -> None:
        self._api = api
        self._mine = f"spec.nodeName={node}"

    def list(self) -> Json:
        return self._api.ask("GET", PODS, fieldSelector=self._mine)

    def watch(self, version: str) -> Changes:
        how = {"watch": True, "allow_watch_bookmarks": True, "timeout_seconds": WATCH_SECONDS}
        query = {"field_selector": self._mine, "resource_version": version, **how}
        timeout = (ANSWER_SECONDS[0], SILENCE_SECONDS)
        return Changes(self._api.open("GET", PODS, "watch pods", query, timeout=timeout), self._api)
