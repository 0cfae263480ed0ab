"""Requests to a Kubernetes API server, in JSON, over the official client's connections and with its credentials.

The client's own methods, one for each kind and verb, come with hundreds of model classes, which take longer to import than
all else that a command or a master needs; none of them is needed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import urllib3
from kubernetes.client import ApiClient, ApiException

JSON, MERGE = "application/json", "application/merge-patch+json"
# By what the client's configuration has: a token, if there is one.
_CREDENTIALS = ["BearerToken"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects in a namespace, as the server's paths have it; ``words`` is for people."""

    api: str
    plural: str
    words: str


_CORE = "/api/v1"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
KINDS: Mapping[str, Kind] = {
    "Pod": Kind(_CORE, "pods", "pods"),
    "Service": Kind(_CORE, "services", "services"),
    "ServiceAccount": Kind(_CORE, "serviceaccounts", "service accounts"),
    "Secret": Kind(_CORE, "secrets", "secrets"),
    "ConfigMap": Kind(_CORE, "configmaps", "config maps"),
    "PersistentVolumeClaim": Kind(_CORE, "persistentvolumeclaims", "persistent volume claims"),
    "Event": Kind(_CORE, "events", "events"),
    "Job": Kind("/apis/batch/v1", "jobs", "jobs"),
    "Role": Kind(_RBAC, "roles", "roles"),
    "RoleBinding": Kind(_RBAC, "rolebindings", "role bindings"),
    "NetworkPolicy": Kind("/apis/networking.k8s.io/v1", "networkpolicies", "network policies"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """``query``: names as Python has them, such as label_selector; ``timeout``: seconds to connect, and to be answered."""

    method: str
    path: str
    timeout: tuple[float, float]
    query: Mapping[str, Any]
    body: Mapping[str, Any] | None = None
    content_type: str = JSON


def path_of(kind: str, namespace: str, name: str = "", part: str = "") -> str:
    """Of all objects of a kind, of one, or of a part of one, such as its log. Names may be anything that somebody typed."""
    found = KINDS[kind]
    parts = (namespace_path(namespace, found.api), found.plural, quote(name, safe=""), part)
    return "/".join(each for each in parts if each)


def namespace_path(namespace: str, api: str = _CORE) -> str:
    """Of a namespace itself, or of what an API has in it."""
    return f"{api}/namespaces/{quote(namespace, safe='')}"


def send(client: ApiClient, request: Request) -> urllib3.BaseHTTPResponse:
    """The answer, of which nothing has been read yet.

    Raises:
        ApiException: the server refuses, or the connection was not to the client's liking.
        urllib3.exceptions.HTTPError: there is no answer.
    """
    query = [(_camel(name), _text(value)) for name, value in request.query.items()]
    headers = {"Accept": f"{JSON}, */*", **({"Content-Type": request.content_type} if request.body else {})}
    serialized = client.param_serialize(
        request.method,
        request.path,
        query_params=query,
        header_params=headers,
        body=request.body,
        auth_settings=_CREDENTIALS,
    )
    answer = client.call_api(*serialized, _request_timeout=request.timeout)
    if not 200 <= answer.status <= 299:
        answer.read()
        raise ApiException.from_response(http_resp=answer, body=None, data=None)
    response: urllib3.BaseHTTPResponse = answer.response
    return response


def _camel(name: str) -> str:
    return re.sub(r"_(\w)", lambda found: found[1].upper(), name)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
