"""The requests that the command line makes of a cluster: one namespace of it, as one user.

Every failure is one of this project's errors, in one line: `NotDoneError` (a UserError) for what the cluster refuses,
UnreachableError for one that does not answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import urllib3
from kubernetes import client

from elasticdl.cli.kubernetes import kubeconfig
from elasticdl.cli.kubernetes.kubeconfig import Place, is_configured
from elasticdl.common.errors import UnreachableError, UserError
from elasticdl.common.kubernetes_requests import JSON, KINDS, MERGE, Request, namespace_path, path_of, send
from elasticdl.common.manifests.names import CONTAINER

Object = dict[str, Any]
ANSWER_SECONDS = (5.0, 30.0)  # to connect, to be answered
SILENCE_SECONDS = 7 * 24 * 3600.0  # of a log that is followed: a job may have nothing to say
STRANGER, FORBIDDEN, ABSENT, EXISTS, INVALID, BUSY = 401, 403, 404, 409, 422, 429

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_METHODS: Mapping[str, str] = {"create": "POST", "read": "GET", "list": "GET", "patch": "PATCH", "delete": "DELETE"}


class NotDoneError(UserError):
    """The cluster refuses a request; ``status`` is that of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def by_quota(self) -> bool:
        return self.status == FORBIDDEN and "exceeded quota" in str(self)

    @property
    def by_rights(self) -> bool:
        """The user may not do this at all, whatever the object."""
        return self.status == FORBIDDEN and "cannot " in str(self) and "resource" in str(self)


class Cluster:
    """One namespace of a cluster. Objects are plain mappings."""

    def __init__(self, configuration: client.Configuration, namespace: str) -> None:
        self._configuration = configuration
        self._client = client.ApiClient(configuration)
        self.namespace = namespace

    @property
    def server(self) -> str:
        return str(self._configuration.host)

    def another_client(self) -> client.ApiClient:
        """For requests of a kind that change the client while they are made."""
        return client.ApiClient(self._configuration)

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """With ``dry_run`` the server does all but keep it."""
        options = {"dry_run": "All"} if dry_run else {}
        return self._ask("create", manifest["kind"], body=manifest, **options)

    def read(self, kind: str, name: str) -> Object:
        return self._ask("read", kind, name)

    def find(self, kind: str, name: str) -> Object | None:
        """As `read`; None if there is none."""
        try:
            return self.read(kind, name)
        except NotDoneError as error:
            if error.status != ABSENT:
                raise
            return None

    def list(self, kind: str, **selection: Any) -> list[Object]:
        """``selection``: label_selector, field_selector."""
        found: list[Object] = self._ask("list", kind, **selection)["items"]
        return found

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> Object:
        return self._ask("patch", kind, name, change)

    def delete(self, kind: str, name: str, *, foreground: bool = False) -> bool:
        """With all that it owns, and, if asked to, only after that. Whether there was any."""
        policy = "Foreground" if foreground else "Background"
        try:
            self._ask("delete", kind, name, propagation_policy=policy)
        except NotDoneError as error:
            if error.status != ABSENT:
                raise
            return False
        return True

    def log(self, pod: str, *, follow: bool = False) -> urllib3.BaseHTTPResponse:
        """The bytes of a pod's log, to be read as they come, and closed."""
        timeout = (ANSWER_SECONDS[0], SILENCE_SECONDS) if follow else ANSWER_SECONDS
        query = {"container": CONTAINER, "follow": follow}
        with self._failures(f"read the log of {pod}"):
            return send(self._client, Request("GET", path_of("Pod", self.namespace, pod, "log"), timeout, query))

    def _ask(self, verb: str, kind: str, name: str = "", body: Mapping[str, Any] | None = None, **query: Any) -> Object:
        path, content_type = path_of(kind, self.namespace, name), MERGE if verb == "patch" else JSON
        with self._failures(f"{verb} {KINDS[kind].words}"):
            return self._send(Request(_METHODS[verb], path, ANSWER_SECONDS, query, body, content_type))

    def _send(self, request: Request) -> Object:
        answer: Object = json.loads(send(self._client, request).data)
        return answer

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except client.ApiException as error:
            if not error.status:  # the client's word for a connection that was not to its liking
                raise UnreachableError(
                    f"the cluster at {self.server} is not to be had: {_one_line(error.reason)}"
                ) from error
            if error.status >= 500 or error.status == BUSY:
                raise UnreachableError(f"the cluster at {self.server} failed: {_message(error)}") from error
            raise NotDoneError(error.status, self._explain(error.status, _message(error), what)) from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise UnreachableError(f"the cluster at {self.server} does not answer: {_one_line(error)}") from error

    def require_namespace(self) -> None:
        """What is asked of a namespace that is not there is answered as if it were empty; who may not look is spared.

        Raises:
            UserError: there is no such namespace.
        """
        try:
            with self._failures("read namespaces"):
                self._send(Request("GET", namespace_path(self.namespace), ANSWER_SECONDS, {}))
        except NotDoneError as error:
            if error.status == ABSENT:
                raise
            if not error.by_rights:
                raise

    def serves(self, group: str) -> bool:
        """Whether it knows objects of that API group; yes if it does not tell."""
        try:
            with self._failures(f"look for {group}"):
                self._send(Request("GET", f"/apis/{group}", ANSWER_SECONDS, {}))
        except NotDoneError as error:
            return error.status != ABSENT
        return True

    def may(self, verb: str, resource: str, group: str = "") -> bool:
        """Whether the user may do so to all of a resource, as in pods or pods/log; yes if the cluster does not tell."""
        resource, _, part = resource.partition("/")
        what = {"group": group, "resource": resource, "subresource": part}
        attributes = {"namespace": self.namespace, "verb": verb, **what}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        try:
            with self._failures("ask what you may do"):
                return bool(self._send(Request("POST", _REVIEWS, ANSWER_SECONDS, {}, review))["status"].get("allowed"))
        except NotDoneError:
            return True

    def _explain(self, status: int, message: str, what: str) -> str:
        if status == STRANGER:
            return f"the cluster at {self.server} does not know you: log in anew, or choose another --kube_context"
        if status == FORBIDDEN and "cannot " in message and "resource" in message:
            return f"you may not {what} in namespace {self.namespace}: {message}"
        if status == ABSENT and f'namespaces "{self.namespace}" not found' in message:
            return f"there is no namespace {self.namespace} in the cluster at {self.server}: choose another --namespace"
        return message


def connect(place: Place) -> Cluster:
    """The cluster that is meant, without asking it.

    Raises:
        UserError: there is no kubeconfig, it can't be used, or there is no such context in it.
    """
    configuration = client.Configuration()
    namespace = kubeconfig.load(configuration, place.context)
    configuration.retries = False
    return Cluster(configuration, place.namespace or namespace)


def namespace_of(place: Place) -> str:
    """The namespace that `connect` would choose; no cluster need be configured."""
    if place.namespace:
        return place.namespace
    return connect(place).namespace if is_configured(place) else kubeconfig.DEFAULT_NAMESPACE


def _message(error: client.ApiException) -> str:
    try:
        return _one_line(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return _one_line(f"{error.status} {error.reason}")


def _one_line(what: object) -> str:
    return " ".join(str(what).split())
