"""The little of the Kubernetes API that a node needs, with objects as plain dictionaries.

The official client takes a second to import and longer to decode a pod than the process in it takes to start.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import urllib3

from tests.cluster.pki import Pair

Json = dict[str, Any]

MERGE = "application/strategic-merge-patch+json"
_TIMEOUT = urllib3.Timeout(connect=3, read=20)
_WATCH_S = 60


class ApiError(Exception):
    """The API server refused: ``status`` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 429 or self.status >= 500


class Unreachable(Exception):
    """The API server did not answer."""


class Api:
    """Requests to one API server; safe for many threads."""

    def __init__(self, server: str, authority: str, identity: Pair) -> None:
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(identity.certificate, identity.key)
        self._server = server
        self._pool = urllib3.PoolManager(ssl_context=context, maxsize=8, retries=False, timeout=_TIMEOUT)

    def get(self, path: str, **query: str) -> Json:
        return self._request("GET", path, query=query)

    def create(self, path: str, body: Json) -> Json:
        return self._request("POST", path, body)

    def patch(self, path: str, body: Json) -> Json:
        return self._request("PATCH", path, body, content_type=MERGE)

    def delete(self, path: str, body: Json) -> Json:
        return self._request("DELETE", path, body)

    def watch(self, path: str, version: str, **query: str) -> Iterator[Json]:
        """Events since ``version``, for a minute or until the connection ends.

        Raises:
            ApiError: with status 410 if the server no longer knows ``version``.
        """
        query |= {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        query["timeoutSeconds"] = str(_WATCH_S)
        try:
            response = self._open("GET", path, query=query, stream=True)
            try:
                yield from map(_event, _lines(response))
            finally:
                response.close()
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(str(error)) from error

    def _request(
        self, method: str, path: str, body: Json | None = None, *, query: Json | None = None, content_type: str = ""
    ) -> Json:
        try:
            response = self._open(method, path, body, query=query, content_type=content_type)
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(str(error)) from error
        found: Json = json.loads(response.data)
        return found

    def _open(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        query: Json | None = None,
        content_type: str = "",
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        url = f"{self._server}{path}" + (f"?{urlencode(query)}" if query else "")
        response = self._pool.request(
            method,
            url,
            body=None if body is None else json.dumps(body),
            headers={"Content-Type": content_type or "application/json", "Accept": "application/json"},
            preload_content=not stream,
            timeout=urllib3.Timeout(connect=3, read=_WATCH_S + 10) if stream else _TIMEOUT,
        )
        if response.status >= 400:
            raise ApiError(response.status, f"{method} {path}: {_message(response)}")
        return response


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    rest = b""
    for chunk in response.stream():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _event(line: bytes) -> Json:
    event: Json = json.loads(line)
    if event["type"] == "ERROR":
        raise ApiError(event["object"].get("code", 500), event["object"].get("message", "the watch has failed"))
    return event


def _message(response: urllib3.BaseHTTPResponse) -> str:
    """What the server says is wrong; a proxy in between may not say it in JSON."""
    text = response.data.decode(errors="replace")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
