"""The requests that are made of a cluster, and how changes of its objects are followed: one namespace, as one user. Objects are plain
mappings.

The official package's own methods, one for each kind and verb, come with hundreds of model classes, which take two
seconds to import; only its connections and its credentials are used here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import urllib3
from kubernetes.client import ApiClient, ApiException, Configuration

from elasticdl.common.backoff import Backoff
from elasticdl.common.errors import ElasticDLError, UnreachableError, UserError
from elasticdl.common.reason import flat
from elasticdl.kube import kubeconfig
from elasticdl.kube.kubeconfig import ClusterTarget, is_configured
from elasticdl.kube.manifests import OVER, is_kept
from elasticdl.kube.names import CONTAINER

# What may come of a request to an API server: one error for each, in one line.


STRANGER, FORBIDDEN, ABSENT, CONFLICT, GONE, INVALID, BUSY = 401, 403, 404, 409, 410, 422, 429


class ApiError(ElasticDLError):
    """A request did not succeed. ``status`` is that of HTTP, 0 if there was no answer."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(flat(message))
        self.status = status
        self.retry_after = retry_after

    @property
    def uncertain(self) -> bool:
        """Whether it may have been done all the same."""
        return self.status == 0 or self.status >= 500


class NoAnswerError(ApiError, UnreachableError):
    """The server is not there, or has too much to do."""


class NotDoneError(ApiError, UserError):
    """The server refuses the request."""

    @property
    def by_quota(self) -> bool:
        return self.status == FORBIDDEN and "exceeded quota" in str(self)

    @property
    def by_rights(self) -> bool:
        """The user may not do this at all, whatever the object."""
        return self.status == FORBIDDEN and _lacks_rights(str(self))


class NotThereError(NotDoneError):
    """There is no such object, or nothing of that kind."""


def _lacks_rights(message: str) -> bool:
    return "cannot " in message and "resource" in message


def _message(error: ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"


def _retry_after(error: ApiException) -> float:
    try:
        return float((error.headers or {}).get("Retry-After", 0))
    except ValueError:
        return 0.0


Object = dict[str, Any]
ANSWER_SECONDS = (5.0, 30.0)  # to connect, to be answered
LOG_SECONDS = 7 * 24 * 3600.0  # of silence in a log that is followed: a job may have nothing to say
JSON, MERGE = "application/json", "application/merge-patch+json"
# The name under which the client's configuration keeps a token, if there is one.
_CREDENTIALS = ["BearerToken"]
_METHODS: Mapping[str, str] = {"create": "POST", "read": "GET", "list": "GET", "patch": "PATCH", "delete": "DELETE"}
_CORE = "/api/v1"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_VOLCANO = "/apis/scheduling.volcano.sh/v1beta1"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
# The API of each kind, and its objects in words, which the server's paths have without spaces.
KINDS: Mapping[str, tuple[str, str]] = {
    "Pod": (_CORE, "pods"),
    "Service": (_CORE, "services"),
    "ServiceAccount": (_CORE, "service accounts"),
    "Secret": (_CORE, "secrets"),
    "ConfigMap": (_CORE, "config maps"),
    "PersistentVolumeClaim": (_CORE, "persistent volume claims"),
    "Event": (_CORE, "events"),
    "Job": ("/apis/batch/v1", "jobs"),
    "Role": (_RBAC, "roles"),
    "RoleBinding": (_RBAC, "role bindings"),
    "PodGroup": (_VOLCANO, "pod groups"),
    "Queue": (_VOLCANO, "queues"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "network policies"),
}
# Those that are in no namespace.
CLUSTER_WIDE = ("Queue",)


def path_of(kind: str, namespace: str, name: str = "", part: str = "") -> str:
    """Of all objects of a kind, of one, or of a part of one, such as its log. Names may be anything that somebody typed."""
    api, words = KINDS[kind]
    base = api if kind in CLUSTER_WIDE else f"{api}/namespaces/{quote(namespace, safe='')}"
    parts = (base, words.replace(" ", ""), quote(name, safe=""), part)
    return "/".join(each for each in parts if each)


class Client:
    """Every method raises `NotDoneError` for what the cluster refuses, `NoAnswerError` if it does not answer."""

    def __init__(self, api: ApiClient, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    @property
    def server(self) -> str:
        return str(self.api.configuration.host)

    @contextlib.contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Everything that a request may raise, as `NoAnswerError` or `NotDoneError`; ``what``: as in "create pods"."""
        server, namespace = self.server, self.namespace
        try:
            yield
        except ApiException as error:
            status = error.status or 0  # 0: the client itself gave the connection up
            if status == 0:
                raise NoAnswerError(0, f"the cluster at {server} is not to be had: {error.reason}") from error
            said, wait = _message(error), _retry_after(error)
            if status >= 500 or status == BUSY:
                raise NoAnswerError(status, f"the cluster at {server} failed: {said}", wait) from error
            if status == STRANGER:
                said = f"the cluster at {server} does not know you: log in anew, or choose another --kube_context"
            elif status == FORBIDDEN and _lacks_rights(said):
                said = f"you may not {what} in namespace {namespace}: {said}"
            elif status == ABSENT and f'namespaces "{namespace}" not found' in said:
                said = f"there is no namespace {namespace} in the cluster at {server}: choose another --namespace"
            kind = NotThereError if status == ABSENT else NotDoneError
            raise kind(status, said, wait) from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise NoAnswerError(0, f"the cluster at {server} does not answer: {error}") from error

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """With ``dry_run`` the server does all but keep it."""
        return self._ask("create", manifest["kind"], body=manifest, query={"dry_run": "All"} if dry_run else None)

    def read(self, kind: str, name: str) -> Object:
        return self._ask("read", kind, name)

    def find(self, kind: str, name: str) -> Object | None:
        """As `read`; None if there is none."""
        with contextlib.suppress(NotThereError):
            return self.read(kind, name)
        return None

    def list(self, kind: str, **selection: str) -> list[Object]:
        """``selection``: label_selector, field_selector."""
        found: list[Object] = self.listing(kind, **selection)["items"]
        return found

    def listing(self, kind: str, **selection: str) -> Object:
        """As `list`, with the version from which a watch goes on."""
        return self._ask("list", kind, query=selection)

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> Object:
        return self._ask("patch", kind, name, change)

    def delete(self, kind: str, name: str, grace: int | None = None) -> bool:
        """With all that it owns; whether there was any. ``grace`` in seconds, of a pod; None: its own."""
        options = {"propagation_policy": "Background", **({} if grace is None else {"grace_period_seconds": grace})}
        with contextlib.suppress(NotThereError):
            self._ask("delete", kind, name, query=options)
            return True
        return False

    def delete_all(self, kind: str, grace: int, **selection: str) -> None:
        self._ask("delete", kind, query={"grace_period_seconds": grace, **selection})

    def log(self, pod: str, *, follow: bool = False) -> urllib3.BaseHTTPResponse:
        """A pod's log, to be read as it comes, and closed. Before each line stands when it was written, and a space."""
        path = path_of("Pod", self.namespace, pod, "log")
        query = {"container": CONTAINER, "follow": follow, "timestamps": True}
        timeout = (ANSWER_SECONDS[0], LOG_SECONDS) if follow else ANSWER_SECONDS
        return self.open("GET", path, f"read the log of {pod}", query, timeout=timeout)

    def serves(self, group: str) -> bool:
        """Whether it knows objects of that API group; yes if it does not tell."""
        try:
            self._send("GET", f"/apis/{group}", f"look for {group}")
        except NotThereError:
            return False
        except NotDoneError:
            return True
        return True

    def may(self, verb: str, resource: str, group: str = "") -> bool:
        """Whether the user may do so to all of a resource, as in pods or pods/log; yes if the cluster does not tell."""
        resource, _, part = resource.partition("/")
        what = {"group": group, "resource": resource, "subresource": part}
        attributes = {"namespace": self.namespace, "verb": verb, **what}
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        try:
            review = self._send(
                "POST", _REVIEWS, "ask what you may do", body={**kind, "spec": {"resourceAttributes": attributes}}
            )
        except NotDoneError:
            return True
        return bool(review["status"].get("allowed"))

    def open(
        self,
        method: str,
        path: str,
        what: str,
        query: Mapping[str, object] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout: tuple[float, float] = ANSWER_SECONDS,
    ) -> urllib3.BaseHTTPResponse:
        """The answer, of which nothing has been read yet. ``query``: names as Python has them, such as label_selector."""
        content_type = {"Content-Type": MERGE if method == "PATCH" else JSON} if body else {}
        sent = [(re.sub(r"_(\w)", lambda one: one[1].upper(), name), value) for name, value in (query or {}).items()]
        texts = [(name, str(value).lower() if isinstance(value, bool) else str(value)) for name, value in sent]
        url, headers = self.signed(method, path, texts, {"Accept": f"{JSON}, */*", **content_type})
        with self.translated(what):
            answer = self.api.call_api(method, url, headers, body, _request_timeout=timeout)
            if not 200 <= answer.status <= 299:
                answer.read()
                raise ApiException.from_response(http_resp=answer, body=None, data=None)
        response: urllib3.BaseHTTPResponse = answer.response
        return response

    def signed(
        self, method: str, path: str, query: Sequence[tuple[str, str]] = (), headers: Mapping[str, str] | None = None
    ) -> tuple[str, dict[str, str]]:
        """The URL, and the headers with the user's credentials."""
        _, url, signed, *_ = self.api.param_serialize(
            method, path, query_params=list(query), header_params=dict(headers or {}), auth_settings=_CREDENTIALS
        )
        return url, signed

    def _ask(
        self,
        verb: str,
        kind: str,
        name: str = "",
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, object] | None = None,
    ) -> Object:
        what = f"{verb} {KINDS[kind][1]}"
        return self._send(_METHODS[verb], path_of(kind, self.namespace, name), what, query, body)

    def _send(self, method: str, path: str, what: str, *arguments: Any, **options: Any) -> Object:
        response = self.open(method, path, what, *arguments, **options)
        with self.translated(what):
            answer: Object = json.loads(response.data)
        return answer


def connect(place: ClusterTarget, *, own_account: bool = False) -> Client:
    """The cluster that is meant, without asking it. ``own_account``: a pod's own comes before any kubeconfig.

    Raises:
        UserError: there is no kubeconfig, it can't be used, or there is no such context in it.
    """
    configuration = Configuration()
    namespace = kubeconfig.load(configuration, place, own_account=own_account)
    configuration.retries = False  # whoever calls knows better what may be repeated
    return Client(ApiClient(configuration), place.namespace or namespace)


def namespace_of(place: ClusterTarget) -> str:
    """The namespace that `connect` would choose; no cluster need be configured."""
    if place.namespace:
        return place.namespace
    return connect(place).namespace if is_configured(place) else kubeconfig.DEFAULT_NAMESPACE


# The end of a gang that Kueue has admitted: without it Kueue keeps pods that have failed, and their quota, for others to come.


def end_group(client: Client, pods: Iterable[Object]) -> None:
    """No others will come. Pods of no such group are let be, and those of which this is said already.

    Raises:
        ApiError: the cluster does not take it.
    """
    for pod in filter(is_kept, pods):
        with contextlib.suppress(NotThereError):
            client.patch("Pod", pod["metadata"]["name"], OVER)


# Following the objects of one kind: list them, watch from there, and go on through whatever interrupts it.
#
# | what happens | what is done |
# | --- | --- |
# | the watch ends, the connection breaks, the server refuses or is not there | watched on from the last version seen |
# | that version has expired (410), or the server does not know it, or anything else fails | listed anew; whoever is told compares |
#
# Each is done after a delay that doubles until there is something to tell again. A version is remembered from every change and
# every bookmark, so a broken connection seldom costs a list. Anything may be told twice.


# A watch is begun anew after so long; the server says something each minute, or its silence is a broken connection.
WATCH_SECONDS = 240
SILENCE_SECONDS = 130.0
# After a server was restored from a backup it answers versions that it does not know with these.
_UNKNOWN_VERSION = (400, GONE, 504)
JOIN_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Changes:
    """Changes as they come: ADDED, MODIFIED, DELETED or BOOKMARK, and the object. Iterating raises `ApiError`, with 410 when a new
    list is needed."""

    def __init__(self, response: urllib3.BaseHTTPResponse, client: Client) -> None:
        self._response = response
        self._client = client

    def __iter__(self) -> Iterator[tuple[str, Object]]:
        with self._client.translated("watch"), contextlib.closing(self._response):
            for line in self._response:
                if line.endswith(b"\n") and line.strip():  # else the connection broke within it
                    said = json.loads(line)
                    if said["type"] == "ERROR":  # 410, or a status of another kind after which only a new list helps
                        raise ApiError(GONE, str(said["object"].get("message", "the watch has expired")))
                    yield said["type"], said["object"]

    def stop(self) -> None:
        """End it, from any thread."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # it has ended by itself
            self._response.shutdown()


class Source:
    """The objects of one kind in a client's namespace; both methods block and raise `ApiError`."""

    def __init__(self, client: Client, kind: str, **selection: str) -> None:
        self._client = client
        self._kind = kind
        self._selection = selection

    def list(self) -> Object:
        """With the version from which a watch goes on."""
        return self._client.listing(self._kind, **self._selection)

    def watch(self, version: str) -> Changes:
        how = {"watch": True, "allow_watch_bookmarks": True, "timeout_seconds": WATCH_SECONDS}
        query = {**self._selection, "resource_version": version, **how}
        path, timeout = path_of(self._kind, self._client.namespace), (ANSWER_SECONDS[0], SILENCE_SECONDS)
        return Changes(self._client.open("GET", path, f"watch {self._kind}", query, timeout=timeout), self._client)


class Watch:
    def __init__(
        self,
        source: Source,
        listed: Callable[[Sequence[Object]], object],
        changed: Callable[[str, Object], object],
        backoff: Backoff,
    ) -> None:
        """``listed`` is told all objects at first, ``changed`` each change by its kind, in the watch's thread."""
        self._source = source
        self._listed = listed
        self._changed = changed
        self._backoff = backoff
        self._version = ""  # empty: to be listed
        self._stopped = threading.Event()
        self._handover = threading.Lock()
        self._stream: Changes | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="kubernetes watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        with self._handover:
            if self._stream:
                self._stream.stop()

    def join(self) -> None:
        """Wait until nothing more is told; after `stop`."""
        if self._thread:
            self._thread.join(JOIN_SECONDS)

    def run(self) -> None:
        while not self._stopped.is_set():
            failure = None
            try:
                self._follow()
            except ApiError as error:
                failure = error
                if error.status in _UNKNOWN_VERSION:
                    self._version = ""
            except Exception:  # noqa: BLE001 - without this thread the master sees nothing any more
                _log.exception("watching anew")
                self._version = ""
            if self._stopped.is_set():
                return
            delay = self._backoff.delay(failure.retry_after if failure else 0.0)
            _log.log(logging.DEBUG if failure is None else logging.INFO, "watching again in %.1f s: %s", delay, failure)
            self._stopped.wait(delay)

    def _follow(self) -> None:
        """List if need be, then tell changes until the watch ends."""
        if not self._version:
            listing = self._source.list()
            self._listed(listing["items"])
            self._version = listing["metadata"]["resourceVersion"]
        stream = self._source.watch(self._version)
        with self._handover:
            self._stream = stream
            if self._stopped.is_set():
                stream.stop()
        try:
            for kind, seen in stream:
                self._backoff.reset()
                self._version = seen["metadata"]["resourceVersion"]
                if kind != "BOOKMARK":
                    self._changed(kind, seen)
        finally:
            with self._handover:
                self._stream = None
