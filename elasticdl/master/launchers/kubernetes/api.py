"""The requests that are made of a cluster, and what may come of them.

`PodApi` and `Source` are ports: `OfficialPods`, `OfficialSource` and the tests' fakes implement them. All of it blocks.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import urllib3
from kubernetes import client, config

from elasticdl.common.credentials import Role
from elasticdl.common.errors import UserError
from elasticdl.common.kubernetes_requests import JSON, MERGE, Request, path_of, send
from elasticdl.common.manifests.names import master_name, selector, state_name
from elasticdl.master.launchers.kubernetes.pods import Manifest

ANSWER_SECONDS = (5.0, 30.0)  # to connect, to be answered
# A watch is begun anew after so long; the server says something each minute, or its silence is a broken connection.
WATCH_SECONDS = 240
SILENCE_SECONDS = 130.0
GONE = 410
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# What is over is kept for its log.
_NOT_OVER = "status.phase!=Succeeded,status.phase!=Failed"


class ApiFailure(Exception):
    """A request did not succeed. ``status`` is that of HTTP, 0 if there was no answer; the text is one line."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status
        self.retry_after = retry_after

    @property
    def uncertain(self) -> bool:
        """Whether it may have been done all the same."""
        return self.status == 0 or self.status >= 500


@dataclass(frozen=True, slots=True)
class Listing:
    items: tuple[Manifest, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Change:
    kind: str  # ADDED, MODIFIED, DELETED or BOOKMARK
    object: Manifest


class Stream(Protocol):
    """Changes as they come; iterating raises `ApiFailure`, with 410 when a new list is needed."""

    def __iter__(self) -> Iterator[Change]: ...

    def stop(self) -> None:
        """End it, from any thread."""


class Source(Protocol):
    """Objects of one kind; both methods raise `ApiFailure`."""

    def list(self) -> Listing: ...

    def watch(self, version: str) -> Stream: ...


class PodApi(Protocol):
    """What is done to worker pods; every method raises `ApiFailure`."""

    def create(self, manifest: Manifest) -> Manifest: ...

    def read(self, name: str) -> Manifest: ...

    def delete(self, name: str, grace: int | None) -> None:
        """``grace`` in seconds; None: the pod's own, 0: forget it at once, whatever becomes of its process."""

    def delete_all(self, grace: int) -> None:
        """Those of the job that are not over."""


def connect(context: str = "", kubeconfig: str = "") -> client.ApiClient:
    """A client as the environment has it: what is named, the pod's own service account, the user's kubeconfig.

    Raises:
        UserError: there is nothing of that, or no such context.
    """
    configuration = client.Configuration()
    try:
        if not (context or kubeconfig) and ACCOUNT.joinpath("token").exists():
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(kubeconfig or None, context or None, client_configuration=configuration)
    except config.ConfigException as error:
        raise UserError(f"no cluster is configured: {' '.join(str(error).split())}") from None
    except Exception as error:  # the client trips in any way over a file that is not what it takes it for
        raise UserError(f"the kubeconfig can't be read: {' '.join(str(error).split())}") from error
    configuration.retries = False  # whoever calls knows better what may be repeated
    return client.ApiClient(configuration)


class OfficialPods:
    """`PodApi` of one job's workers."""

    def __init__(self, api: client.ApiClient, job: str, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._selector = selector(job, Role.WORKER)

    def create(self, manifest: Manifest) -> Manifest:
        return _answer(self._api, "POST", path_of("Pod", self._namespace), manifest)

    def read(self, name: str) -> Manifest:
        return _answer(self._api, "GET", path_of("Pod", self._namespace, name))

    def delete(self, name: str, grace: int | None) -> None:
        options = {} if grace is None else {"grace_period_seconds": grace}
        _answer(self._api, "DELETE", path_of("Pod", self._namespace, name), query=options)

    def delete_all(self, grace: int) -> None:
        which = {"label_selector": self._selector, "field_selector": _NOT_OVER}
        _answer(self._api, "DELETE", path_of("Pod", self._namespace), query={**which, "grace_period_seconds": grace})


class OfficialJob:
    """The master's own Job, the events about it, and the ConfigMap of its state."""

    def __init__(self, api: client.ApiClient, job: str, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._job = path_of("Job", namespace, master_name(job))
        self._state = path_of("ConfigMap", namespace, state_name(job))

    def read_job(self) -> Manifest:
        return _answer(self._api, "GET", self._job)

    def patch_job(self, change: Manifest) -> Manifest:
        return _answer(self._api, "PATCH", self._job, change)

    def create_event(self, manifest: Manifest) -> Manifest:
        return _answer(self._api, "POST", path_of("Event", self._namespace), manifest)

    def read_state(self) -> Manifest:
        return _answer(self._api, "GET", self._state)

    def patch_state(self, change: Manifest) -> Manifest:
        return _answer(self._api, "PATCH", self._state, change)


class OfficialSource:
    """`Source` of the objects of one kind in a namespace."""

    def __init__(self, api: client.ApiClient, kind: str, namespace: str, **selection: str) -> None:
        self._api = api
        self._path = path_of(kind, namespace)
        self._selection = selection

    def list(self) -> Listing:
        answer = _answer(self._api, "GET", self._path, query=self._selection)
        return Listing(tuple(answer["items"]), answer["metadata"]["resourceVersion"])

    def watch(self, version: str) -> Stream:
        query: dict[str, Any] = {
            **self._selection,
            "resource_version": version,
            "watch": True,
            "allow_watch_bookmarks": True,
            "timeout_seconds": WATCH_SECONDS,
        }
        with _failures():
            return OfficialStream(
                send(self._api, Request("GET", self._path, (ANSWER_SECONDS[0], SILENCE_SECONDS), query))
            )


def pod_source(api: client.ApiClient, job: str, namespace: str) -> OfficialSource:
    return OfficialSource(api, "Pod", namespace, label_selector=selector(job, Role.WORKER))


def event_source(api: client.ApiClient, namespace: str) -> OfficialSource:
    """Events about any pod; those of a job can't be chosen, as events have no labels."""
    return OfficialSource(api, "Event", namespace, field_selector="involvedObject.kind=Pod")


class OfficialStream:
    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response
        self._closing = threading.Lock()

    def __iter__(self) -> Iterator[Change]:
        rest = b""
        with _failures(), contextlib.closing(self._response):
            for piece in self._response.stream(amt=None, decode_content=False):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _change(json.loads(line))

    def stop(self) -> None:
        with self._closing, contextlib.suppress(OSError, ValueError, RuntimeError):  # it has ended by itself
            self._response.shutdown()


def _change(said: Mapping[str, Any]) -> Change:
    if said["type"] == "ERROR":  # 410, or a status of another kind after which only a new list helps
        raise ApiFailure(GONE, str(said["object"].get("message", "the watch has expired")))
    return Change(said["type"], said["object"])


def _answer(
    api: client.ApiClient, method: str, path: str, body: Manifest | None = None, query: Mapping[str, Any] | None = None
) -> Manifest:
    content_type = MERGE if method == "PATCH" else JSON
    with _failures():
        answer: Manifest = json.loads(
            send(api, Request(method, path, ANSWER_SECONDS, query or {}, body, content_type)).data
        )
    return answer


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Everything that a request may raise, as `ApiFailure`."""
    try:
        yield
    except client.ApiException as error:
        raise ApiFailure(error.status or 0, _message(error), _retry_after(error)) from error
    except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
        raise ApiFailure(0, f"the cluster does not answer: {error}") from error


def _message(error: client.ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"


def _retry_after(error: client.ApiException) -> float:
    try:
        return float((error.headers or {}).get("Retry-After", 0))
    except ValueError:
        return 0.0
